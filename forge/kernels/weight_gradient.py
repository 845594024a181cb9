"""The gradients of the experts' matrices: products over the rows of each expert, one launch for all experts.

A program takes tile after tile of all matrices; how many rows are added is each expert's own number. As in
forge.kernels.grouped, every tile is written by one program, and sums have a fixed order.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from forge.kernels.devices import num_multiprocessors
from forge.kernels.grouped import copies, described
from forge.kernels.placement import Placement
from forge.kernels.tilings import Tiling


def weight_gradient(left: Tensor, right: Tensor, where: Placement, gathered: str, how: Tiling) -> Tensor:
    """left^T @ right over the rows of each expert: [E, m, n]. One of the two is sorted, [R, ...]; `gathered` ("left"
    or "right") stands in the order of tokens, [N, ...]. An expert without rows gets zeros."""
    num_experts, height, columns = len(where.ends), left.shape[1], right.shape[1]
    out = left.new_empty(num_experts, height, columns)
    in_order, part = (right, how.columns) if gathered == "left" else (left, how.rows)
    by_copier = how.by_copier and copies(in_order, in_order.shape[1])
    tiles = num_experts * triton.cdiv(height, how.rows) * triton.cdiv(columns, how.columns)
    _weight_gradient[(min(tiles, how.per_multiprocessor * num_multiprocessors(out.device)),)](
        left, right, described(in_order, how.depth, part) if by_copier else None, out, where.sources, where.ends,
        num_experts, height, columns, where.slots.shape[1], gathered == "left", by_copier, how.rows, how.columns,
        how.depth, num_warps=how.warps, num_stages=how.stages)
    return out


@triton.jit     # type: ignore[untyped-decorator]
def _weight_gradient(  # type: ignore[no-untyped-def]
        left, right, described, out, sources, ends, num_experts, M: tl.constexpr, N: tl.constexpr,
        TOP_K: tl.constexpr, GATHER_LEFT: tl.constexpr, BY_COPIER: tl.constexpr, ROWS: tl.constexpr,
        COLUMNS: tl.constexpr, DEPTH: tl.constexpr):
    row_tiles: tl.constexpr = (M + ROWS - 1) // ROWS
    column_tiles: tl.constexpr = (N + COLUMNS - 1) // COLUMNS
    for tile in range(tl.program_id(0), num_experts * row_tiles * column_tiles, tl.num_programs(0)):
        expert = tile // (row_tiles * column_tiles)
        first_m = tile // column_tiles % row_tiles * ROWS
        first_n = tile % column_tiles * COLUMNS
        first = tl.load(ends + expert - 1, mask=expert > 0, other=0)
        stop = tl.load(ends + expert)
        whole = first + (stop - first) // DEPTH * DEPTH
        sums = tl.zeros([ROWS, COLUMNS], tl.float32)
        for start in range(first, whole, DEPTH):
            row = start + tl.arange(0, DEPTH)
            token = tl.load(sources + row) // TOP_K
            if BY_COPIER and not GATHER_LEFT:
                one = described.load([start, first_m])
            else:
                one = _columns_of(left, token if GATHER_LEFT else row, None, first_m, M, ROWS)
            if BY_COPIER and GATHER_LEFT:
                other = described.load([start, first_n])
            else:
                other = _columns_of(right, row if GATHER_LEFT else token, None, first_n, N, COLUMNS)
            sums = tl.dot(tl.trans(one), other, sums, input_precision="ieee")
        if whole < stop:
            # Rows past the expert's last are another's, or nothing that was ever written: neither may be multiplied.
            row = whole + tl.arange(0, DEPTH)
            live = row < stop
            token = tl.load(sources + row, mask=live, other=0) // TOP_K
            one = _columns_of(left, token if GATHER_LEFT else row, live, first_m, M, ROWS)
            other = _columns_of(right, row if GATHER_LEFT else token, live, first_n, N, COLUMNS)
            sums = tl.dot(tl.trans(one), other, sums, input_precision="ieee")
        m, n = first_m + tl.arange(0, ROWS), first_n + tl.arange(0, COLUMNS)
        tl.store(out + expert.to(tl.int64) * (M * N) + m.to(tl.int64)[:, None] * N + n[None, :],
                 sums.to(out.dtype.element_ty), mask=(m < M)[:, None] & (n < N)[None, :])


@triton.jit     # type: ignore[untyped-decorator]
def _columns_of(  # type: ignore[no-untyped-def]
        tensor, row, live, first, SIZE: tl.constexpr, COUNT: tl.constexpr):
    """[rows, COUNT]: columns `first` and so on of these rows of [..., SIZE]; zeros where not live. live: None: all."""
    column = first + tl.arange(0, COUNT)
    place = tensor + row.to(tl.int64)[:, None] * SIZE + column[None, :]
    if live is None and SIZE % COUNT == 0:
        found = tl.load(place)
    elif live is None:
        found = tl.load(place, mask=(column < SIZE)[None, :], other=0)
    else:
        found = tl.load(place, mask=live[:, None] & (column < SIZE)[None, :], other=0)
    return found
