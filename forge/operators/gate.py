"""The gate on attention's output (Qiu et al. 2025, arXiv 2505.06708): heads * sigmoid(gate)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from forge.operators import Operators
from forge.operators.kernels import has_kernels

Gated = Callable[[Tensor, Tensor], Tensor]


def gating(operators: Operators) -> Gated:
    """How this option computes it: heads [B, H, T, D], gate [B, T, H] or [B, T, H * D] -> [B, T, H * D]."""
    return gated if getattr(operators, "fused_gate", False) else gated_plainly


def gated_plainly(heads: Tensor, gate: Tensor) -> Tensor:
    values = heads.transpose(1, 2)
    opened = torch.sigmoid(gate.unflatten(-1, (heads.shape[1], -1)))
    return (values * opened).to(heads.dtype).flatten(2)


def gated(heads: Tensor, gate: Tensor) -> Tensor:
    if not has_kernels(heads.device, heads.dtype):
        return gated_plainly(heads, gate)
    return _Gated.apply(heads, gate)            # type: ignore[no-any-return, no-untyped-call]


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, heads: Tensor, gate: Tensor) -> Tensor:
        heads = heads if heads.stride(-1) == 1 else heads.contiguous()
        gate = gate.contiguous()
        ctx.save_for_backward(heads, gate)
        return gated_heads(heads, gate)         # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        return gated_heads_backward(gradient.contiguous(), *ctx.saved_tensors)      # type: ignore[no-any-return]


@torch.library.custom_op("forge::gated_heads", mutates_args=())
def gated_heads(heads: Tensor, gate: Tensor) -> Tensor:
    """See forge.kernels.gated."""
    from forge.kernels import gated as kernel

    return kernel.gated(heads, gate)


@gated_heads.register_fake
def _(heads: Tensor, gate: Tensor) -> Tensor:
    batch, num_heads, length, width = heads.shape
    return heads.new_empty(batch, length, num_heads * width)


@torch.library.custom_op("forge::gated_heads_backward", mutates_args=())
def gated_heads_backward(gradient: Tensor, heads: Tensor, gate: Tensor) -> tuple[Tensor, Tensor]:
    """See forge.kernels.gated."""
    from forge.kernels import gated as kernel

    return kernel.gated_backward(gradient, heads, gate)


@gated_heads_backward.register_fake
def _(gradient: Tensor, heads: Tensor, gate: Tensor) -> tuple[Tensor, Tensor]:
    batch, num_heads, length, width = heads.shape
    return heads.new_empty(batch, length, num_heads, width).transpose(1, 2), torch.empty_like(gate)
