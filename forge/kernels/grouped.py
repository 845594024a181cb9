"""Matrix products of rows that stand sorted by expert, each with its expert's matrix: one launch for all experts.

Tiles of rows and their experts come from forge.kernels.placement; a program takes tile after tile, so any load of the
experts is one launch, and the host never learns how many rows an expert has. Every output tile is written by one
program, and sums have a fixed order, so the same input gives the same bits. Products accumulate in float32.

Shapes: R = N * top_k rows; d: width; f: hidden; E: experts. All tensors contiguous.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from forge.kernels.devices import num_multiprocessors
from forge.kernels.placement import Placement
from forge.kernels.tuned import Tiling


def up(x: Tensor, gate_up: Tensor, top_k: int, where: Placement, h: Tensor, a: Tensor, how: Tiling) -> None:
    """h = gathered x @ gate_up^T; a = silu(h[:, :f]) * h[:, f:]. x: [N, d]; gate_up: [E, 2f, d]; h: [R, 2f];
    a: [R, f]."""
    hidden, width = gate_up.shape[1] // 2, gate_up.shape[2]
    programs = _programs(where, triton.cdiv(hidden, how.columns), how)
    _up[(programs,)](
        x, gate_up, h, a, where.sources, where.ends, where.tiles, where.num_tiles, where.tiles.shape[1], width, hidden,
        top_k, how.rows, how.columns, how.depth, num_warps=how.warps, num_stages=how.stages)


def down(rows: Tensor, weights: Tensor, where: Placement, out: Tensor, how: Tiling, transposed: bool) -> None:
    """out = rows @ weights (transposed: @ weights^T). rows: [R, k]; weights: [E, k, n] ([E, n, k]); out: [R, n]."""
    columns = out.shape[1]
    programs = _programs(where, triton.cdiv(columns, how.columns), how)
    _down[(programs,)](
        rows, weights, out, where.ends, where.tiles, where.num_tiles, where.tiles.shape[1], rows.shape[1], columns,
        transposed, how.rows, how.columns, how.depth, num_warps=how.warps, num_stages=how.stages)


def down_backward(grad: Tensor, down_weight: Tensor, weights: Tensor, h: Tensor, where: Placement,
                  weights_grad: Tensor, h_grad: Tensor, weighted: Tensor, how: Tiling) -> None:
    """Back through the weighting, the second product and the activation, which is computed again from h.

    grad: [N, d]; down_weight: [E, d, f]; weights: [N, top_k] float32; h: [R, 2f].
    weights_grad: [column tiles, R] float32, parts of the gradient of each row's weight, to be added;
    h_grad: [R, 2f]; weighted: [R, f], the activation times its row's weight, as the gradient of down_weight needs it.
    """
    width, hidden = down_weight.shape[1:]
    programs = _programs(where, triton.cdiv(hidden, how.columns), how)
    _down_backward[(programs,)](
        grad, down_weight, weights, h, weights_grad, h_grad, weighted, where.sources, where.ends, where.tiles,
        where.num_tiles, where.tiles.shape[1], h.shape[0], width, hidden, weights.shape[1], how.rows, how.columns,
        how.depth, num_warps=how.warps, num_stages=how.stages)


def weight_gradient(left: Tensor, right: Tensor, where: Placement, out: Tensor, top_k: int, gathered: str,
                    how: Tiling) -> None:
    """out[e] = left^T @ right over the rows of expert e: [E, m, n]. One of the two is sorted, [R, ...]; `gathered`
    ("left" or "right") stands in the order of tokens, [N, ...]. An expert without rows gets zeros."""
    num_experts, height, columns = out.shape
    tiles = num_experts * triton.cdiv(height, how.rows) * triton.cdiv(columns, how.columns)
    _weight_gradient[(min(tiles, how.per_multiprocessor * num_multiprocessors(out.device)),)](
        left, right, out, where.sources, where.ends, num_experts, height, columns, top_k, gathered == "left",
        how.rows, how.columns, how.depth, num_warps=how.warps, num_stages=how.stages)


def _programs(where: Placement, columns: int, how: Tiling) -> int:
    return min(where.tiles.shape[1] * columns, how.per_multiprocessor * num_multiprocessors(where.ends.device))


@triton.jit     # type: ignore[untyped-decorator]
def _tile(tile, ends, tiles, most_tiles, COLUMN_TILES: tl.constexpr, ROWS: tl.constexpr):  # type: ignore[no-untyped-def]
    """(expert, rows, the same but none past the expert's last, live, column tile). A token's row is read by all its
    column tiles at about the same time."""
    index = tile // COLUMN_TILES
    expert = tl.load(tiles + index)
    row = tl.load(tiles + most_tiles + index) + tl.arange(0, ROWS)
    stop = tl.load(ends + expert)
    return expert.to(tl.int64), row, tl.minimum(row, stop - 1), row < stop, tile % COLUMN_TILES


@triton.jit     # type: ignore[untyped-decorator]
def _up(  # type: ignore[no-untyped-def]
        x, gate_up, h, a, sources, ends, tiles, num_tiles, most_tiles, WIDTH: tl.constexpr, HIDDEN: tl.constexpr,
        TOP_K: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr):
    column_tiles: tl.constexpr = (HIDDEN + COLUMNS - 1) // COLUMNS
    for tile in range(tl.program_id(0), tl.load(num_tiles) * column_tiles, tl.num_programs(0)):
        expert, row, inside, live, column_tile = _tile(tile, ends, tiles, most_tiles, column_tiles, ROWS)
        token = (tl.load(sources + inside) // TOP_K).to(tl.int64)
        column = column_tile * COLUMNS + tl.arange(0, COLUMNS)
        k = tl.arange(0, DEPTH)
        left = x + token[:, None] * WIDTH + k[None, :]
        gate = gate_up + expert * (2 * HIDDEN * WIDTH) + tl.minimum(column, HIDDEN - 1)[None, :] * WIDTH + k[:, None]
        gates = tl.zeros([ROWS, COLUMNS], tl.float32)
        ups = tl.zeros([ROWS, COLUMNS], tl.float32)
        for start in range(0, WIDTH, DEPTH):
            if WIDTH % DEPTH == 0:
                lefts, gs, us = tl.load(left), tl.load(gate), tl.load(gate + HIDDEN * WIDTH)
            else:
                rest = start + k < WIDTH
                lefts = tl.load(left, mask=rest[None, :], other=0)
                gs = tl.load(gate, mask=rest[:, None], other=0)
                us = tl.load(gate + HIDDEN * WIDTH, mask=rest[:, None], other=0)
            gates = tl.dot(lefts, gs, gates, input_precision="ieee")
            ups = tl.dot(lefts, us, ups, input_precision="ieee")
            left += DEPTH
            gate += DEPTH
        there = live[:, None] & (column < HIDDEN)[None, :]
        place = h + row.to(tl.int64)[:, None] * (2 * HIDDEN) + column[None, :]
        rounded_gates, rounded_ups = gates.to(h.dtype.element_ty), ups.to(h.dtype.element_ty)
        tl.store(place, rounded_gates, mask=there)
        tl.store(place + HIDDEN, rounded_ups, mask=there)
        # From what was written, since backward sees nothing else.
        active = _silu(rounded_gates.to(tl.float32)) * rounded_ups.to(tl.float32)
        tl.store(a + row.to(tl.int64)[:, None] * HIDDEN + column[None, :], active.to(a.dtype.element_ty), mask=there)


@triton.jit     # type: ignore[untyped-decorator]
def _silu(gate):  # type: ignore[no-untyped-def]
    return gate / (1 + tl.exp(-gate))


@triton.jit     # type: ignore[untyped-decorator]
def _multiply(  # type: ignore[no-untyped-def]
        left, weights, column, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, K: tl.constexpr,
        N: tl.constexpr, TRANSPOSED: tl.constexpr):
    """left: pointers to the first column of each row, [ROWS]; weights: to one matrix, [K, N] or, TRANSPOSED, [N, K]."""
    k = tl.arange(0, DEPTH)
    lefts = left[:, None] + k[None, :]
    if TRANSPOSED:
        rights = weights + tl.minimum(column, N - 1)[None, :] * K + k[:, None]
    else:
        rights = weights + k[:, None] * N + column[None, :]
    sums = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, K, DEPTH):
        if K % DEPTH == 0:
            one = tl.load(lefts)
        else:
            one = tl.load(lefts, mask=(start + k < K)[None, :], other=0)
        if K % DEPTH == 0 and (TRANSPOSED or N % COLUMNS == 0):
            other = tl.load(rights)
        else:
            other = tl.load(rights, mask=(start + k < K)[:, None] & (column < N)[None, :], other=0)
        sums = tl.dot(one, other, sums, input_precision="ieee")
        lefts += DEPTH
        rights += DEPTH if TRANSPOSED else DEPTH * N
    return sums


@triton.jit     # type: ignore[untyped-decorator]
def _down(  # type: ignore[no-untyped-def]
        rows, weights, out, ends, tiles, num_tiles, most_tiles, K: tl.constexpr, N: tl.constexpr,
        TRANSPOSED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr):
    column_tiles: tl.constexpr = (N + COLUMNS - 1) // COLUMNS
    for tile in range(tl.program_id(0), tl.load(num_tiles) * column_tiles, tl.num_programs(0)):
        expert, row, inside, live, column_tile = _tile(tile, ends, tiles, most_tiles, column_tiles, ROWS)
        column = column_tile * COLUMNS + tl.arange(0, COLUMNS)
        sums = _multiply(rows + inside.to(tl.int64) * K, weights + expert * (K * N), column, ROWS, COLUMNS, DEPTH, K, N,
                         TRANSPOSED)
        tl.store(out + row.to(tl.int64)[:, None] * N + column[None, :], sums.to(out.dtype.element_ty),
                 mask=live[:, None] & (column < N)[None, :])


@triton.jit     # type: ignore[untyped-decorator]
def _down_backward(  # type: ignore[no-untyped-def]
        grad, down_weight, weights, h, weights_grad, h_grad, weighted, sources, ends, tiles, num_tiles, most_tiles,
        all_rows, WIDTH: tl.constexpr, HIDDEN: tl.constexpr, TOP_K: tl.constexpr, ROWS: tl.constexpr,
        COLUMNS: tl.constexpr, DEPTH: tl.constexpr):
    column_tiles: tl.constexpr = (HIDDEN + COLUMNS - 1) // COLUMNS
    for tile in range(tl.program_id(0), tl.load(num_tiles) * column_tiles, tl.num_programs(0)):
        expert, row, inside, live, column_tile = _tile(tile, ends, tiles, most_tiles, column_tiles, ROWS)
        source = tl.load(sources + inside)
        column = column_tile * COLUMNS + tl.arange(0, COLUMNS)
        a_grad = _multiply(grad + (source // TOP_K).to(tl.int64) * WIDTH, down_weight + expert * (WIDTH * HIDDEN),
                           column, ROWS, COLUMNS, DEPTH, WIDTH, HIDDEN, False)
        weight = tl.load(weights + source)
        # In parts, since a whole tile of gate, up and gradient does not fit into registers.
        parts = tl.permute(tl.reshape(a_grad, [ROWS, 2, COLUMNS // 2]), [0, 2, 1])
        left, right = tl.split(parts)
        column = column_tile * COLUMNS + tl.arange(0, COLUMNS // 2)
        weight_grad = _back_through(left, weight, h, h_grad, weighted, row, live, column, HIDDEN)
        weight_grad += _back_through(right, weight, h, h_grad, weighted, row, live, column + COLUMNS // 2, HIDDEN)
        tl.store(weights_grad + tl.cast(column_tile, tl.int64) * all_rows + row, weight_grad, mask=live)


@triton.jit     # type: ignore[untyped-decorator]
def _back_through(  # type: ignore[no-untyped-def]
        a_grad, weight, h, h_grad, weighted, row, live, column, HIDDEN: tl.constexpr):
    """The activation's and the weighting's backward for some columns; returns their part of the weight's gradient."""
    there = live[:, None] & (column < HIDDEN)[None, :]
    place = row.to(tl.int64)[:, None] * (2 * HIDDEN) + column[None, :]
    gate = tl.load(h + place, mask=there, other=0).to(tl.float32)
    up = tl.load(h + place + HIDDEN, mask=there, other=0).to(tl.float32)
    open_ = 1 / (1 + tl.exp(-gate))
    active = gate * open_ * up
    weight_grad = tl.sum(tl.where(there, a_grad * active, 0.0), axis=1)
    tl.store(weighted + row.to(tl.int64)[:, None] * HIDDEN + column[None, :],
             (active * weight[:, None]).to(weighted.dtype.element_ty), mask=there)
    a_grad *= weight[:, None]
    slope = open_ * (1 + gate * (1 - open_))
    tl.store(h_grad + place, (a_grad * up * slope).to(h_grad.dtype.element_ty), mask=there)
    tl.store(h_grad + place + HIDDEN, (a_grad * gate * open_).to(h_grad.dtype.element_ty), mask=there)
    return weight_grad


@triton.jit     # type: ignore[untyped-decorator]
def _weight_gradient(  # type: ignore[no-untyped-def]
        left, right, out, sources, ends, num_experts, M: tl.constexpr, N: tl.constexpr, TOP_K: tl.constexpr,
        GATHER_LEFT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr):
    row_tiles: tl.constexpr = (M + ROWS - 1) // ROWS
    column_tiles: tl.constexpr = (N + COLUMNS - 1) // COLUMNS
    for tile in range(tl.program_id(0), num_experts * row_tiles * column_tiles, tl.num_programs(0)):
        expert = tile // (row_tiles * column_tiles)
        m = tile // column_tiles % row_tiles * ROWS + tl.arange(0, ROWS)
        n = tile % column_tiles * COLUMNS + tl.arange(0, COLUMNS)
        first = tl.load(ends + expert - 1, mask=expert > 0, other=0)
        stop = tl.load(ends + expert)
        sums = tl.zeros([ROWS, COLUMNS], tl.float32)
        for start in range(first, stop, DEPTH):
            row = start + tl.arange(0, DEPTH)
            live = row < stop
            token = (tl.load(sources + row, mask=live, other=0) // TOP_K).to(tl.int64)
            lefts = token if GATHER_LEFT else row.to(tl.int64)
            rights = row.to(tl.int64) if GATHER_LEFT else token
            # Rows past the expert's last are another's, or nothing that was ever written: neither may be multiplied.
            one = tl.load(left + lefts[:, None] * M + m[None, :], mask=live[:, None] & (m < M)[None, :], other=0)
            other = tl.load(right + rights[:, None] * N + n[None, :], mask=live[:, None] & (n < N)[None, :], other=0)
            sums = tl.dot(tl.trans(one), other, sums, input_precision="ieee")
        tl.store(out + expert.to(tl.int64) * (M * N) + m.to(tl.int64)[:, None] * N + n[None, :],
                 sums.to(out.dtype.element_ty), mask=(m < M)[:, None] & (n < N)[None, :])
