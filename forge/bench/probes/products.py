"""The grouped products of a layer alone, on tokens that are sorted already: what routing costs is beside them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from forge.errors import UnusableEnvironment
from forge.kernels import runs_on
from forge.moe_router.grouped import grouped_product, one_by_one

if TYPE_CHECKING:
    from forge.bench.probes.contenders import Layer

Multiply = Callable[..., Tensor]        # (rows [R, width], gate_up, down) -> [R, width]


def torch_products(experts: Tensor, layer: Layer) -> Multiply:
    """By torch. experts: [R], ascending."""
    return _by(grouped_product, experts, layer)


def plain_products(experts: Tensor, layer: Layer) -> Multiply:
    """By one product an expert: the twin."""
    return _by(one_by_one, experts, layer)


def _by(product: Multiply, experts: Tensor, layer: Layer) -> Multiply:
    ends = torch.searchsorted(experts, torch.arange(len(layer.down), device=experts.device), right=True)
    ends = ends.to(torch.int32)

    def multiply(rows: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        gate, up = product(rows, gate_up, ends).chunk(2, dim=-1)
        return product(F.silu(gate) * up, down, ends)
    return multiply


def kernel_products(experts: Tensor, layer: Layer) -> Multiply:
    """By forge's own kernels, with their epilogues. Raises UnusableEnvironment where they do not run."""
    device = layer.x.device
    if not runs_on(device, "bench=experts", "no grouped_kernels"):
        raise UnusableEnvironment("grouped_kernels: forge's kernels do not run on this device.")
    from forge.kernels.placement import place
    from forge.kernels.tilings import tilings

    how: Any = tilings(device, layer.x.dtype)
    where = place(experts.unsqueeze(-1), len(layer.down), how["up"].rows)

    def multiply(rows: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        out: Tensor = _Products.apply(rows, gate_up, down, where, how)      # type: ignore[no-untyped-call]
        return out
    return multiply


class _Products(torch.autograd.Function):
    """What forge.moe_router.by_kernels launches, without placing and combining."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, gate_up: Tensor, down: Tensor, where: Any, how: Any) -> Tensor:
        from forge.kernels import grouped

        h, active = grouped.up(rows, gate_up, where, how["up"])
        ctx.save_for_backward(rows, gate_up, down, h)
        ctx.where, ctx.how = where, how
        return grouped.down(active, down, where, how["down"], transposed=True)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        from forge.kernels import grouped
        from forge.kernels.weight_gradient import weight_gradient

        (rows, gate_up, down, h), where, how, grad = ctx.saved_tensors, ctx.where, ctx.how, grads[0].contiguous()
        ones = torch.ones(len(rows), 1, device=rows.device)
        _, h_grad, active = grouped.down_backward(grad, down, ones, h, where, how["down_backward"])
        down_grad = weight_gradient(grad, active, where, "left", how["down_gradient"])
        rows_grad = grouped.down(h_grad, gate_up, where, how["up_backward"], transposed=False)
        gate_up_grad = weight_gradient(h_grad, rows, where, "right", how["gate_up_gradient"])
        return rows_grad, gate_up_grad, down_grad, None, None
