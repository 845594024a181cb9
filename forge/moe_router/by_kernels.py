"""How tokens pass through the experts they chose, by forge's own kernels (see forge.kernels.grouped).

Tokens are gathered inside the first product, the activation is computed in its epilogue, and what comes out of the
second is gathered and weighted: copies of the tokens in their experts' order are never made. Kept for backward: the
tokens, what enters the activation, and a few integers a choice; the activation is computed again. (The plan of work is
SonicMoE's, Guo et al. 2025.) Operators of our own, so that compilers take each as it is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from forge.kernels.placement import Placement


def by_kernels(tokens: Tensor, experts: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """See forge.moe_router.experts, whose functions are the twins. tokens: float32 or of 16 bits."""
    rows = placed_rows(tokens)
    return through_experts(tokens, weights, gate_up, down, *_place(experts, gate_up.shape[0], rows))


def placed_rows(tokens: Tensor) -> int:
    """The height of a tile: what Placement is made for."""
    from forge.kernels.tilings import tilings

    return tilings(tokens.device, tokens.dtype)["up"].rows


def through_experts(tokens: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, slots: Tensor, sources: Tensor,
                    ends: Tensor, tiles: Tensor, num_tiles: Tensor) -> Tensor:
    """The weighted sum of the chosen experts' outputs; the last five are a Placement."""
    y, _ = _experts(tokens.contiguous(), weights.float().contiguous(), gate_up.contiguous(), down.contiguous(), slots,
                    sources, ends, tiles, num_tiles)
    return y


@torch.library.custom_op("forge::place", mutates_args=())
def _place(experts: Tensor, num_experts: int, rows: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    from forge.kernels.placement import place

    return tuple(place(experts.contiguous(), num_experts, rows))     # type: ignore[return-value]


@_place.register_fake
def placed_like(experts: Tensor, num_experts: int, rows: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    slots = torch.empty_like(experts, dtype=torch.int32)
    return (slots, slots.new_empty(experts.numel()), slots.new_empty(num_experts),
            slots.new_empty(2, experts.numel() // rows + num_experts), slots.new_empty(1))


@torch.library.custom_op("forge::experts", mutates_args=())
def _experts(tokens: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, slots: Tensor, sources: Tensor,
             ends: Tensor, tiles: Tensor, num_tiles: Tensor) -> tuple[Tensor, Tensor]:
    """(y [N, width], h [N * top_k, 2 * hidden]: what enters the activation)"""
    from forge.kernels import combine, grouped
    from forge.kernels.placement import Placement
    from forge.kernels.tilings import tilings

    where, how = Placement(slots, sources, ends, tiles, num_tiles), tilings(tokens.device, tokens.dtype)
    h = tokens.new_empty(slots.numel(), gate_up.shape[1])
    active = tokens.new_empty(slots.numel(), down.shape[2])
    grouped.up(tokens, gate_up, slots.shape[1], where, h, active, how["up"])
    rows = tokens.new_empty(slots.numel(), tokens.shape[1])
    grouped.down(active, down, where, rows, how["down"], transposed=True)
    y = torch.empty_like(tokens)
    combine.combine(rows, slots, weights, y)
    return y, h


@_experts.register_fake
def _(tokens: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, slots: Tensor, sources: Tensor, ends: Tensor,
      tiles: Tensor, num_tiles: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(tokens), tokens.new_empty(slots.numel(), gate_up.shape[1])


@torch.library.custom_op("forge::experts_backward", mutates_args=())
def _experts_backward(grad: Tensor, tokens: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, h: Tensor,
                      slots: Tensor, sources: Tensor, ends: Tensor, tiles: Tensor,
                      num_tiles: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of tokens, weights, gate_up and down."""
    from forge.kernels import combine, grouped
    from forge.kernels.placement import Placement
    from forge.kernels.tilings import tilings

    where, how = Placement(slots, sources, ends, tiles, num_tiles), tilings(tokens.device, tokens.dtype)
    grad, top_k = grad.contiguous(), slots.shape[1]
    parts, h_grad, weighted = grouped.down_backward(grad, down, weights, h, where, how["down_backward"])
    down_grad = torch.empty_like(down)
    grouped.weight_gradient(grad, weighted, where, down_grad, top_k, "left", how["down_gradient"])
    del weighted
    rows = tokens.new_empty(slots.numel(), tokens.shape[1])
    grouped.down(h_grad, gate_up, where, rows, how["up_backward"], transposed=False)
    tokens_grad = torch.empty_like(tokens)
    combine.combine(rows, slots, None, tokens_grad)
    del rows
    gate_up_grad = torch.empty_like(gate_up)
    grouped.weight_gradient(h_grad, tokens, where, gate_up_grad, top_k, "right", how["gate_up_gradient"])
    return tokens_grad, combine.collect(parts, slots), gate_up_grad, down_grad


@_experts_backward.register_fake
def _(grad: Tensor, tokens: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, h: Tensor, slots: Tensor,
      sources: Tensor, ends: Tensor, tiles: Tensor, num_tiles: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return torch.empty_like(tokens), torch.empty_like(weights), torch.empty_like(gate_up), torch.empty_like(down)


def _keep(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor]) -> None:
    tokens, weights, gate_up, down, *where = inputs
    ctx.save_for_backward(tokens, weights, gate_up, down, output[1], *where)
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
    found = (None,) * 4 if grad is None else _experts_backward(grad, *ctx.saved_tensors)
    return *found, None, None, None, None, None


_experts.register_autograd(_backward, setup_context=_keep)
