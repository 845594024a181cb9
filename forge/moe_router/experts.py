"""How N tokens pass through the experts they chose. Each function is one algorithm for the same result.

tokens: [N, width]. experts: [N, top_k] int64, distinct in a row, but for num_experts: no expert computes that choice,
whose weight counts for nothing. weights: [N, top_k], at least float32.
gate_up: [num_experts, 2 * hidden, width]; down: [num_experts, width, hidden]; both in the dtype of tokens.
Result: [N, width] in the dtype of tokens: the weighted sum of the chosen experts' outputs, added in weights' dtype.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from forge.moe_router.choice import tokens_per_expert
from forge.moe_router.grouped import grouped_product


def loop(tokens: Tensor, experts: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """Expert by expert, in the order of their ids. An expert without tokens takes part, with zero rows, so that its
    parameters get a gradient. On a GPU each expert waits for the host, which needs to know its number of tokens."""
    y = torch.zeros_like(tokens, dtype=weights.dtype)
    for expert, (up_weight, down_weight) in enumerate(zip(gate_up.unbind(), down.unbind(), strict=True)):
        row, slot = (experts == expert).nonzero(as_tuple=True)
        out = F.linear(_swiglu(F.linear(tokens[row], up_weight)), down_weight)
        y = y.index_add(0, row, weights[row, slot].unsqueeze(-1) * out)
    return y.to(tokens.dtype)


def by_sorting(tokens: Tensor, experts: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """Copies of the tokens in the order of their experts, one grouped matrix product a layer, and the way back.

    Nothing waits for the host, and nothing is added atomically, so the same input gives the same bits.
    """
    dropped = experts == gate_up.shape[0]
    order = experts.flatten().argsort(stable=True)
    place = torch.empty_like(order).scatter(0, order, torch.arange(order.numel(), device=order.device))
    ends = tokens_per_expert(experts, gate_up.shape[0]).cumsum(0).to(torch.int32)
    rows: Tensor = _Dispatch.apply(tokens, order, place, dropped)   # type: ignore[no-untyped-call]
    hidden = _swiglu(grouped_product(rows, gate_up, ends))
    out = grouped_product(hidden, down, ends)
    mine: Tensor = _Collect.apply(out, order, place, dropped)       # type: ignore[no-untyped-call]
    weights = weights.masked_fill(dropped, 0).unsqueeze(-1)
    return (mine.view(*experts.shape, tokens.shape[-1]) * weights).sum(dim=1).to(tokens.dtype)


def _swiglu(gate_and_up: Tensor) -> Tensor:
    gate, up = gate_and_up.chunk(2, dim=-1)
    return F.silu(gate) * up


# Dropped choices are sorted behind all others. A grouped product leaves their rows as the memory was, which may be nan:
# they are overwritten where they would leave the sorted order, forward and backward, and never multiplied away.
class _Dispatch(torch.autograd.Function):
    """tokens[order // top_k]. Autograd's own backward would add top_k rows to each token atomically."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, order: Tensor, place: Tensor, dropped: Tensor) -> Tensor:
        ctx.save_for_backward(place, dropped)
        return tokens.index_select(0, order // dropped.shape[-1])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        place, dropped = ctx.saved_tensors
        mine = grads[0].index_select(0, place).view(*dropped.shape, grads[0].shape[-1])
        return mine.masked_fill(dropped.unsqueeze(-1), 0).sum(dim=1), None, None, None


class _Collect(torch.autograd.Function):
    """rows[place], the inverse of the permutation `order`. Its backward is a gather too, and contiguous, which the
    grouped matrix product requires of its gradient."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, place: Tensor, dropped: Tensor) -> Tensor:
        ctx.save_for_backward(order)
        return rows.index_select(0, place).masked_fill(dropped.view(-1, 1), 0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        (order,) = ctx.saved_tensors
        return grads[0].index_select(0, order), None, None, None
