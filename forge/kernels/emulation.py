"""What each kernel of a mixture of experts computes, in NumPy, line by line: to look at, and to debug against.

The same names, shapes and order as in choice.py, placement.py, grouped.py and combine.py; loops where those have
programs. Rows that no choice has are left not a number, so that whatever reads one shows it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

Array = np.ndarray[Any, Any]


class Placement(NamedTuple):
    """See forge.kernels.placement.Placement; here `tiles` holds those there are, and `sources` the rows there are."""

    slots: Array
    sources: Array
    ends: Array
    tiles: Array


def choose(logits: Array, bias: Array, top_k: int, score: str, normalize: bool, scale: float) -> tuple[Array, Array]:
    """(experts, weights), both [N, top_k]."""
    scores = _scores(logits, score)
    keys = logits if not bias.any() else (logits if score == "softmax_of_chosen" else scores) + bias
    experts = np.argsort(-np.where(np.isnan(keys), np.inf, keys), axis=1, kind="stable")[:, :top_k]
    if not (normalize or score == "softmax_of_chosen"):
        return experts, np.take_along_axis(scores, experts, axis=1) * scale
    values = -np.logaddexp(0, -logits) if score == "sigmoid" else logits
    return experts, _scores(np.take_along_axis(values, experts, axis=1), "softmax") * scale


def place(experts: Array, num_experts: int, rows: int) -> Placement:
    chosen = experts.reshape(-1)
    sources = np.argsort(chosen, kind="stable")[: int((chosen < num_experts).sum())]
    slots = np.full(chosen.size, -1)
    slots[sources] = np.arange(sources.size)
    counts = np.array([int((chosen == expert).sum()) for expert in range(num_experts)])
    ends = np.cumsum(counts)
    tiles = [(expert, row) for expert in range(num_experts)
             for row in range(int(ends[expert] - counts[expert]), int(ends[expert]), rows)]
    return Placement(slots.reshape(experts.shape), sources, ends, np.array(tiles).reshape(-1, 2).T)


def weights_backward(grad: Array, logits: Array, experts: Array, score: str, normalize: bool, scale: float) -> Array:
    scores, wanted = _scores(logits, score), np.zeros_like(logits)
    np.put_along_axis(wanted, experts, grad * scale, axis=1)
    if not (normalize or score == "softmax_of_chosen"):
        slope: Array = wanted * scores * (1 - scores) if score == "sigmoid" else scores * (
            wanted - (wanted * scores).sum(axis=1, keepdims=True))
        return slope
    values = -np.logaddexp(0, -logits) if score == "sigmoid" else logits
    shares = np.zeros_like(logits)
    np.put_along_axis(shares, experts, _scores(np.take_along_axis(values, experts, axis=1), "softmax"), axis=1)
    slope = shares * (wanted - (wanted * shares).sum(axis=1, keepdims=True))
    return np.asarray(slope * (1 - scores) if score == "sigmoid" else slope)


def up(x: Array, gate_up: Array, top_k: int, where: Placement) -> tuple[Array, Array]:
    """(h, a)"""
    hidden = gate_up.shape[1] // 2
    h = np.full((where.slots.size, 2 * hidden), np.nan, x.dtype)
    for expert, rows in _groups(where):
        h[rows] = x[where.sources[rows] // top_k] @ gate_up[expert].T
    gate = h[:, :hidden]
    return h, gate / (1 + np.exp(-gate)) * h[:, hidden:]


def down(rows: Array, weights: Array, where: Placement, transposed: bool) -> Array:
    out = np.full((len(rows), weights.shape[1 if transposed else 2]), np.nan, rows.dtype)
    for expert, mine in _groups(where):
        out[mine] = rows[mine] @ (weights[expert].T if transposed else weights[expert])
    return out


def down_backward(grad: Array, down_weight: Array, weights: Array, h: Array,
                  where: Placement) -> tuple[Array, Array, Array]:
    """(the gradient of each row's weight [R], of h, the weighted activation)"""
    hidden, top_k = h.shape[1] // 2, weights.shape[1]
    a_grad = np.full((len(h), hidden), np.nan, h.dtype)
    for expert, rows in _groups(where):
        a_grad[rows] = grad[where.sources[rows] // top_k] @ down_weight[expert]
    weight = np.full((len(h), 1), np.nan, h.dtype)
    weight[: len(where.sources), 0] = weights.reshape(-1)[where.sources]
    gate, up = h[:, :hidden], h[:, hidden:]
    opened = 1 / (1 + np.exp(-gate))
    weights_grad = (a_grad * gate * opened * up).sum(axis=1)
    a_grad = a_grad * weight
    h_grad = np.concatenate([a_grad * up * opened * (1 + gate * (1 - opened)), a_grad * gate * opened], axis=1)
    return weights_grad, h_grad, gate * opened * up * weight


def weight_gradient(left: Array, right: Array, where: Placement, top_k: int, gathered: str) -> Array:
    out = np.zeros((len(where.ends), left.shape[1], right.shape[1]), left.dtype)
    for expert, rows in _groups(where):
        tokens = where.sources[rows] // top_k
        out[expert] = (left[tokens if gathered == "left" else rows].T
                       @ right[tokens if gathered == "right" else rows])
    return out


def combine(rows: Array, slots: Array, weights: Array | None) -> Array:
    out = np.zeros((len(slots), rows.shape[1]), rows.dtype)
    for token, mine in enumerate(slots):
        for choice, slot in enumerate(mine):
            if slot >= 0:
                out[token] += rows[slot] * (1 if weights is None else weights[token, choice])
    return out


def collect(parts: Array, slots: Array) -> Array:
    total = parts.sum(axis=0)
    return np.where(slots >= 0, total[np.maximum(slots, 0)], 0)


def _scores(logits: Array, score: str) -> Array:
    if score == "sigmoid":
        return np.asarray(1 / (1 + np.exp(-logits)))
    raised = np.exp(logits - logits.max(axis=1, keepdims=True, initial=-np.inf))
    return np.asarray(raised / raised.sum(axis=1, keepdims=True))


def _groups(where: Placement) -> list[tuple[int, slice]]:
    return [(expert, slice(int(start), int(stop)))
            for expert, (start, stop) in enumerate(zip([0, *where.ends[:-1]], where.ends, strict=True))]
