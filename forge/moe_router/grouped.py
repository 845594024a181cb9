"""The matrix product of sorted rows with each group's own matrix."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from forge.notes import say


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def can_group(device_type: str, dtype: torch.dtype, width: int, hidden: int) -> bool:
    """Whether torch's grouped matrix product runs here; if not, says so and that the plain loop is used."""
    supported = (torch.bfloat16,) if device_type == "cuda" else (torch.float32, torch.bfloat16, torch.float16)
    name = str(dtype).removeprefix("torch.")
    if dtype not in supported:
        say(f"moe_router: torch has no grouped matrix product for {name} on {device_type}, so experts are computed one "
            f"after the other, as moe_router=loop does.")
        return False
    aligned = 16 // dtype.itemsize
    if width % aligned or hidden % aligned:
        say(f"moe_router: torch's grouped matrix product wants model.width and model.hidden to be multiples of "
            f"{aligned} in {name}, and they are {width} and {hidden}, so experts are computed one after the other, as "
            f"moe_router=loop does.")
        return False
    return True


def grouped_product(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """rows [N, k], weights [groups, n, k], ends [groups] int32 -> [N, n].

    Rows ends[g - 1] to ends[g] are multiplied by the transpose of weights[g].
    """
    if rows.dtype == torch.bfloat16:
        return F.grouped_mm(rows, weights.transpose(-2, -1), offs=ends)
    product: Tensor = _opaque_product(rows, weights, ends)
    return product


# Eager torch computes other dtypes on a CPU; the tracer behind torch.compile refuses them. Inside operators of our own
# it does not look.
@torch.library.custom_op("forge::grouped_product", mutates_args=())
def _opaque_product(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    return F.grouped_mm(rows, weights.transpose(-2, -1), offs=ends)


@torch.library.custom_op("forge::grouped_product_backward", mutates_args=())
def _opaque_backward(grad: Tensor, rows: Tensor, weights: Tensor, ends: Tensor) -> tuple[Tensor, Tensor]:
    grad = grad.contiguous()
    return F.grouped_mm(grad, weights, offs=ends), F.grouped_mm(grad.T, rows, offs=ends)


@_opaque_product.register_fake
def _(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    return rows.new_empty(rows.shape[0], weights.shape[1])


@_opaque_backward.register_fake
def _(grad: Tensor, rows: Tensor, weights: Tensor, ends: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(rows), torch.empty_like(weights)


def _keep(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
    return *_opaque_backward(grad, *ctx.saved_tensors), None


_opaque_product.register_autograd(_backward, setup_context=_keep)
