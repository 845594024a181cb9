"""How tokens pass through the experts they chose, by forge's own kernels (see forge.kernels.grouped).

Tokens are gathered inside the first product, the activation is computed in its epilogue, and what comes out of the
second is gathered and weighted: copies of the tokens in their experts' order are never made. Kept for backward: the
tokens, what enters the activation, and a few integers a choice; the activation is computed again. (The plan of work is
SonicMoE's, Guo et al. 2025.) Operators of our own, so that compilers take each as it is.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from forge.decisions import decision
from forge.moe_router import Routing


def by_kernels(tokens: Tensor, experts: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """See forge.moe_router.experts, whose functions are the twins. tokens: float32 or of 16 bits."""
    placement = _place(experts, gate_up.shape[0], placed_rows(tokens.device, tokens.dtype))
    return through_experts(tokens, weights, gate_up, down, list(placement))


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def placed_rows(device: torch.device, dtype: torch.dtype) -> int:
    """The height of a tile, which a Placement is made for. dtype: of the tokens that will be multiplied."""
    from forge.kernels.tilings import tilings

    return tilings(device, dtype)["up"].rows


def through_experts(tokens: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, placement: list[Tensor]) -> Tensor:
    """The weighted sum of the chosen experts' outputs. placement: the tensors of a Placement."""
    y: Tensor = _experts(tokens.contiguous(), weights.float().contiguous(), gate_up.contiguous(), down.contiguous(),
                         placement)[0]
    return y


def choose_and_place(logits: Tensor, bias: Tensor, valid: Tensor, routing: Routing,
                     rows: int) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    """(experts [N, top_k] int64, weights [N, top_k] float32, load [2, num_experts] float32, a Placement), by one
    kernel.

    logits: [N, num_experts] float32. bias: [num_experts]. valid: [N] bool. rows: see placed_rows. Of routing without
    groups; what moves choices afterwards is not applied.
    """
    experts, weights, load, *placement = _choose_and_place(
        logits, bias, valid, routing.top_k, rows, routing.score, routing.normalize, routing.scale)
    return experts, weights, load, placement


@decision("choose_and_place")
def _choose_and_place(
        logits: Tensor, bias: Tensor, valid: Tensor, top_k: int, rows: int, score: str, normalize: bool,
        scale: float) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    from forge.kernels.choice import Scores
    from forge.kernels.placement import choose_and_place

    experts, weights, load, placement = choose_and_place(
        logits.contiguous(), bias, valid.contiguous(), top_k, rows, Scores(score, normalize, scale))
    return experts, weights, load, *placement


@_choose_and_place.register_fake
def _(logits: Tensor, bias: Tensor, valid: Tensor, top_k: int, rows: int, score: str, normalize: bool,
      scale: float) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    experts = logits.new_empty(logits.shape[0], top_k, dtype=torch.int64)
    weights = torch.empty_like(experts, dtype=torch.float32)
    return experts, weights, bias.new_empty(2, logits.shape[1]), *placed_like(experts, logits.shape[1], rows)


@torch.library.custom_op("forge::weights_backward", mutates_args=())
def _weights_backward(grad: Tensor, logits: Tensor, experts: Tensor, score: str, normalize: bool,
                      scale: float) -> Tensor:
    from forge.kernels.choice import Scores, weights_backward

    return weights_backward(grad, logits, experts, Scores(score, normalize, scale))


@_weights_backward.register_fake
def _(grad: Tensor, logits: Tensor, experts: Tensor, score: str, normalize: bool, scale: float) -> Tensor:
    return torch.empty_like(logits)


def _keep_choice(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    logits, _, _, _, _, *ctx.how = inputs
    experts, _, load, *placement = output
    ctx.save_for_backward(logits, experts)
    ctx.mark_non_differentiable(experts, load, *placement)
    ctx.set_materialize_grads(False)


def _choice_backward(ctx: Any, _: None, grad: Tensor | None, *rest: None) -> tuple[Tensor | None, ...]:
    found = None if grad is None else _weights_backward(grad, *ctx.saved_tensors, *ctx.how)
    return found, *(None,) * 7


_choose_and_place.register_autograd(_choice_backward, setup_context=_keep_choice)


@torch.library.custom_op("forge::place", mutates_args=())
def _place(experts: Tensor, num_experts: int, rows: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    from forge.kernels.placement import place

    slots, sources, ends, tiles, num_tiles = place(experts.contiguous(), num_experts, rows)
    return slots, sources, ends, tiles, num_tiles


@_place.register_fake
def placed_like(experts: Tensor, num_experts: int, rows: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    slots = torch.empty_like(experts, dtype=torch.int32)
    return (slots, slots.new_empty(experts.numel()), slots.new_empty(num_experts),
            slots.new_empty(2, experts.numel() // rows + num_experts), slots.new_empty(1))


@torch.library.custom_op("forge::experts", mutates_args=())
def _experts(tokens: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor,
             placement: list[Tensor]) -> tuple[Tensor, Tensor]:
    """(y [N, width], h [N * top_k, 2 * hidden]: what enters the activation)"""
    from forge.kernels import combine, grouped
    from forge.kernels.placement import Placement
    from forge.kernels.tilings import tilings

    where, how = Placement(*placement), tilings(tokens.device, tokens.dtype)
    h, active = grouped.up(tokens, gate_up, where, how["up"])
    rows = grouped.down(active, down, where, how["down"], transposed=True)
    return combine.combine(rows, where.slots, weights), h


@_experts.register_fake
def _(tokens: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor,
      placement: list[Tensor]) -> tuple[Tensor, Tensor]:
    return torch.empty_like(tokens), tokens.new_empty(weights.numel(), gate_up.shape[1])


@torch.library.custom_op("forge::experts_backward", mutates_args=())
def _experts_backward(grad: Tensor, tokens: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, h: Tensor,
                      placement: list[Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of tokens, weights, gate_up and down."""
    from forge.kernels import combine, grouped
    from forge.kernels.placement import Placement
    from forge.kernels.tilings import tilings

    where, how, grad = Placement(*placement), tilings(tokens.device, tokens.dtype), grad.contiguous()
    parts, h_grad, weighted = grouped.down_backward(grad, down, weights, h, where, how["down_backward"])
    down_grad = grouped.weight_gradient(grad, weighted, where, "left", how["down_gradient"])
    del weighted
    rows = grouped.down(h_grad, gate_up, where, how["up_backward"], transposed=False)
    tokens_grad = combine.combine(rows, where.slots, None)
    del rows
    gate_up_grad = grouped.weight_gradient(h_grad, tokens, where, "right", how["gate_up_gradient"])
    return tokens_grad, combine.collect(parts, where.slots), gate_up_grad, down_grad


@_experts_backward.register_fake
def _(grad: Tensor, tokens: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, h: Tensor,
      placement: list[Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return torch.empty_like(tokens), torch.empty_like(weights), torch.empty_like(gate_up), torch.empty_like(down)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    tokens, weights, gate_up, down, placement = inputs
    ctx.save_for_backward(tokens, weights, gate_up, down, output[1], *placement)
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad: Tensor | None, _: None) -> tuple[Any, ...]:
    tokens, weights, gate_up, down, h, *placement = ctx.saved_tensors
    if grad is None:
        return None, None, None, None, [None] * len(placement)
    return *_experts_backward(grad, tokens, weights, gate_up, down, h, placement), [None] * len(placement)


_experts.register_autograd(_backward, setup_context=_keep)
