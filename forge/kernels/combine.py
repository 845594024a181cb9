"""The rows of a token's experts, added in its choices' order: a gather, so nothing is added atomically."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

COLUMNS = 1024          # of a row that a program adds at a time


def combine(rows: Tensor, slots: Tensor, weights: Tensor | None) -> Tensor:
    """[N, d]: the sum over j of weights[t, j] * rows[slots[t, j]], in float32. rows: [R, d]; slots: [N, top_k] int32,
    -1: none; weights: [N, top_k] float32, or None for ones."""
    (tokens, top_k), width = slots.shape, rows.shape[1]
    out = rows.new_empty(tokens, width)
    if tokens:
        columns = min(COLUMNS, triton.next_power_of_2(width))
        _combine[(tokens, triton.cdiv(width, columns))](
            rows, slots, weights, out, width, top_k, weights is not None, columns)
    return out


def collect(parts: Tensor, slots: Tensor) -> Tensor:
    """[N, top_k] float32: the sum over the first dimension of parts, [P, R] float32, of each choice's row; 0 where it
    has none."""
    out = torch.empty(slots.shape, dtype=torch.float32, device=slots.device)
    choices = slots.numel()
    if choices:
        _collect[(triton.cdiv(choices, COLUMNS),)](parts, slots, out, choices, parts.shape[0], parts.shape[1], COLUMNS)
    return out


@triton.jit(do_not_specialize=["choices", "rows"])     # type: ignore[untyped-decorator]
def _collect(  # type: ignore[no-untyped-def]
        parts, slots, out, choices, num_parts: tl.constexpr, rows, COLUMNS: tl.constexpr):
    choice = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    there = choice < choices
    slot = tl.load(slots + choice, mask=there, other=-1).to(tl.int64)
    total = tl.zeros([COLUMNS], tl.float32)
    for part in range(num_parts):
        total += tl.load(parts + slot + part * rows, mask=slot >= 0, other=0)
    tl.store(out + choice, total, mask=there)


@triton.jit     # type: ignore[untyped-decorator]
def _combine(  # type: ignore[no-untyped-def]
        rows, slots, weights, out, WIDTH: tl.constexpr, TOP_K: tl.constexpr, WEIGHTED: tl.constexpr,
        COLUMNS: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros([COLUMNS], tl.float32)
    for j in tl.static_range(TOP_K):
        slot = tl.load(slots + token * TOP_K + j).to(tl.int64)
        row = tl.load(rows + tl.maximum(slot, 0) * WIDTH + column, mask=column < WIDTH, other=0).to(tl.float32)
        if WEIGHTED:
            row *= tl.load(weights + token * TOP_K + j)
        total += tl.where(slot >= 0, row, 0.0)                      # what was dropped may be anything, also no number
    tl.store(out + token * WIDTH + column, total.to(out.dtype.element_ty), mask=column < WIDTH)
