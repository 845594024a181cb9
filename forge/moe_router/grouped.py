"""The matrix product of sorted rows with each group's own matrix."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from forge.notes import say


def grouped_product(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """rows [N, k], weights [groups, n, k], ends [groups] int32 -> [N, n].

    Rows ends[g - 1] to ends[g] are multiplied by the transpose of weights[g]. What is computed of rows past the last
    end, forward and backward, is left as the memory was, and may be nan.
    """
    if len(rows) and _has_kernel(rows.device.type, rows.dtype, weights.shape[1], weights.shape[2]):
        return F.grouped_mm(rows, weights.transpose(-2, -1), offs=ends)
    product: Tensor = one_by_one(rows, weights, ends)
    return product


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _has_kernel(device_type: str, dtype: torch.dtype, rows: int, columns: int) -> bool:
    """Whether torch has one kernel for all groups; if a GPU lacks it, says so."""
    if dtype == torch.bfloat16 and rows % 8 == 0 and columns % 8 == 0:      # 16 bytes
        return True
    if device_type == "cuda":
        say(f"moe_router: torch's grouped matrix product takes bfloat16, and widths (model.width, model.hidden) that "
            f"are multiples of 8. This run has {str(dtype).removeprefix('torch.')} and {columns} to {rows}, so it "
            f"computes one product an expert, and waits for the GPU before each.")
    return False


# Operators of our own, since the sizes of the groups are read on the host, which no compiled graph can do.
@torch.library.custom_op("forge::one_by_one", mutates_args=())
def one_by_one(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """The twin: a product a group."""
    out = rows.new_empty(rows.shape[0], weights.shape[1])
    for weight, group in zip(weights, _groups(ends), strict=True):
        torch.mm(rows[group], weight.T, out=out[group])
    return out


@torch.library.custom_op("forge::one_by_one_backward", mutates_args=())
def one_by_one_backward(grad: Tensor, rows: Tensor, weights: Tensor, ends: Tensor) -> tuple[Tensor, Tensor]:
    rows_grad, weights_grad = torch.empty_like(rows), torch.empty_like(weights)
    for weight, weight_grad, group in zip(weights, weights_grad, _groups(ends), strict=True):
        torch.mm(grad[group], weight, out=rows_grad[group])
        torch.mm(grad[group].T, rows[group], out=weight_grad)
    return rows_grad, weights_grad


def _groups(ends: Tensor) -> list[slice]:
    stops = ends.tolist()
    return [slice(start, stop) for start, stop in zip([0, *stops[:-1]], stops, strict=True)]


@one_by_one.register_fake
def _(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    return rows.new_empty(rows.shape[0], weights.shape[1])


@one_by_one_backward.register_fake
def _(grad: Tensor, rows: Tensor, weights: Tensor, ends: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(rows), torch.empty_like(weights)


def _keep(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
    return *one_by_one_backward(grad, *ctx.saved_tensors), None


one_by_one.register_autograd(_backward, setup_context=_keep)
