"""Which experts a token goes to, and with which weight: forward inside the launch that places, backward by itself."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

CELLS = 4096            # tokens (or tiles) times experts that a program looks at at a time, in registers


class Scores(NamedTuple):
    """How logits become weights: see forge.moe_router.Routing, whose names these are."""

    score: str
    normalize: bool
    scale: float


def weights_backward(grad: Tensor, logits: Tensor, experts: Tensor, how: Scores) -> Tensor:
    """The gradient of the logits, [N, num_experts] float32, from that of the weights, [N, top_k] float32."""
    grad, logits, experts = grad.contiguous(), logits.contiguous(), experts.contiguous()
    out = torch.empty_like(logits)
    tokens, num_experts = logits.shape
    if tokens:
        block = at_once(num_experts, CELLS)
        _weights_backward[(triton.cdiv(tokens, block),)](
            grad, logits, experts, out, tokens, how.scale, num_experts, experts.shape[1], how.score,
            how.normalize, block, triton.next_power_of_2(num_experts), triton.next_power_of_2(experts.shape[1]))
    return out


def at_once(num_experts: int, cells: int) -> int:
    """How many tokens make so many cells, each of which has one for every expert."""
    experts: int = triton.next_power_of_2(num_experts)
    return min(64, max(1, cells // experts))


@triton.jit     # type: ignore[untyped-decorator]
def cells_of(token, last, K: tl.constexpr, BLOCK_K: tl.constexpr):  # type: ignore[no-untyped-def]
    """Where [N, K] holds the choices of these tokens, and which of those cells there are: both [tokens, BLOCK_K]."""
    choice = tl.arange(0, BLOCK_K)
    return token.to(tl.int64)[:, None] * K + choice[None, :], (token < last)[:, None] & (choice < K)[None, :]


@triton.jit     # type: ignore[untyped-decorator]
def column_of(values, j, COLUMNS: tl.constexpr):  # type: ignore[no-untyped-def]
    return tl.sum(tl.where(tl.arange(0, COLUMNS)[None, :] == j, values, 0), axis=1)


@triton.jit     # type: ignore[untyped-decorator]
def choose_experts(  # type: ignore[no-untyped-def]
        logits, bias, weights, experts, token, last, scale, E: tl.constexpr, K: tl.constexpr, SCORE: tl.constexpr,
        NORMALIZE: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_K: tl.constexpr):
    """Writes experts and weights of these tokens; returns the ids [tokens, BLOCK_K], E beyond K."""
    expert, choice = tl.arange(0, BLOCK_E), tl.arange(0, BLOCK_K)
    live = token < last
    logit = _logits(logits, token, live, E, BLOCK_E)
    biases = tl.load(bias + expert, mask=expert < E, other=0)
    key = logit                                                         # rounding in a score makes and breaks ties
    if tl.max(tl.where(biases != 0, 1, 0), axis=0) > 0:
        key = (logit if SCORE == "softmax_of_chosen" else _score(logit, SCORE)) + biases[None, :]
    key = tl.where(key == key, key, float("inf"))
    key = tl.maximum(key, -3.0e38)                                      # -inf means taken, or no expert
    key = tl.where((expert < E)[None, :], key, float("-inf"))
    value = _value(logit, SCORE, NORMALIZE)
    ids = tl.full([token.shape[0], BLOCK_K], E, tl.int32)
    picked = tl.full([token.shape[0], BLOCK_K], float("-inf"), tl.float32)
    for j in range(K):
        best = tl.argmax(key, axis=1, tie_break_left=True).to(tl.int32)
        mine = best[:, None] == expert[None, :]
        found = tl.sum(tl.where(mine, value, 0.0), axis=1)
        ids = tl.where(choice[None, :] == j, best[:, None], ids)
        picked = tl.where(choice[None, :] == j, found[:, None], picked)
        key = tl.where(mine, float("-inf"), key)
    if NORMALIZE or SCORE == "softmax_of_chosen":
        picked = _score(picked, "softmax")
    cell, there = cells_of(token, last, K, BLOCK_K)
    tl.store(experts + cell, ids.to(tl.int64), mask=there)
    tl.store(weights + cell, picked * scale, mask=there)
    return ids


@triton.jit     # type: ignore[untyped-decorator]
def _logits(logits, token, live, E: tl.constexpr, BLOCK_E: tl.constexpr):  # type: ignore[no-untyped-def]
    expert = tl.arange(0, BLOCK_E)
    found = tl.load(logits + token.to(tl.int64)[:, None] * E + expert[None, :],
                    mask=live[:, None] & (expert < E)[None, :], other=float("-inf"))
    return tl.where(live[:, None], found, 0.0)


@triton.jit     # type: ignore[untyped-decorator]
def _score(logit, SCORE: tl.constexpr):  # type: ignore[no-untyped-def]
    if SCORE == "sigmoid":
        score = 1 / (1 + tl.exp(-logit))
    else:
        raised = tl.exp(logit - tl.max(logit, axis=1)[:, None])
        score = raised / tl.sum(raised, axis=1)[:, None]
    return score


@triton.jit     # type: ignore[untyped-decorator]
def _value(logit, SCORE: tl.constexpr, NORMALIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    """What the weights of the chosen are made of: scores; where those are made to sum to one, their logarithms, so that
    the weights are a softmax and no sum can vanish."""
    if SCORE == "sigmoid" and NORMALIZE:
        value = tl.minimum(logit, 0.0) - tl.log(1 + tl.exp(-tl.abs(logit)))
    elif SCORE == "softmax_of_chosen" or NORMALIZE:
        value = logit
    else:
        value = _score(logit, SCORE)
    return value


@triton.jit(do_not_specialize=["tokens"])     # type: ignore[untyped-decorator]
def _weights_backward(  # type: ignore[no-untyped-def]
        grad, logits, experts, out, tokens, scale, E: tl.constexpr, K: tl.constexpr, SCORE: tl.constexpr,
        NORMALIZE: tl.constexpr, TOKENS: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_K: tl.constexpr):
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    expert, choice = tl.arange(0, BLOCK_E), tl.arange(0, BLOCK_K)
    live = token < tokens
    logit = _logits(logits, token, live, E, BLOCK_E)
    cell, there = cells_of(token, tokens, K, BLOCK_K)
    ids = tl.load(experts + cell, mask=there, other=E).to(tl.int32)
    given = tl.load(grad + cell, mask=there, other=0.0) * scale
    wanted = tl.zeros([TOKENS, BLOCK_E], tl.float32)                    # the gradient of each expert's value
    chosen = tl.zeros([TOKENS, BLOCK_E], tl.int32)
    for j in range(K):
        mine = column_of(ids, j, BLOCK_K)[:, None] == expert[None, :]
        wanted = tl.where(mine, tl.sum(tl.where(choice[None, :] == j, given, 0.0), axis=1)[:, None], wanted)
        chosen = tl.where(mine, 1, chosen)
    if NORMALIZE or SCORE == "softmax_of_chosen":
        value = tl.where(chosen > 0, _value(logit, SCORE, NORMALIZE), float("-inf"))
        share = _score(tl.where(live[:, None], value, 0.0), "softmax")
        slope = share * (wanted - tl.sum(wanted * share, axis=1)[:, None])
        if SCORE == "sigmoid":
            slope *= 1 - _score(logit, SCORE)
    else:
        score = _score(logit, SCORE)
        if SCORE == "sigmoid":
            slope = wanted * score * (1 - score)
        else:
            slope = score * (wanted - tl.sum(wanted * score, axis=1)[:, None])
    tl.store(out + token.to(tl.int64)[:, None] * E + expert[None, :], slope,
             mask=live[:, None] & (expert < E)[None, :])
