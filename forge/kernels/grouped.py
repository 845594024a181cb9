"""Matrix products of rows that stand sorted by expert, each with its expert's matrix: one launch for all experts.

Tiles of rows and their experts come from forge.kernels.placement; a program takes tile after tile, so any load of the
experts is one launch, and the host never learns how many rows an expert has. Every output tile is written by one
program, and sums have a fixed order, so the same input gives the same bits. Products accumulate in float32.

Shapes: R = N * top_k rows; d: width; f: hidden; E: experts. All tensors contiguous.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from forge.kernels.devices import num_multiprocessors
from forge.kernels.placement import Placement
from forge.kernels.tilings import Tiling


def up(x: Tensor, gate_up: Tensor, where: Placement, how: Tiling) -> tuple[Tensor, Tensor]:
    """h = gathered x @ gate_up^T, and silu(h[:, :f]) * h[:, f:]. x: [N, d]; gate_up: [E, 2f, d]; h: [R, 2f]."""
    hidden, width = gate_up.shape[1] // 2, gate_up.shape[2]
    rows, top_k = where.slots.numel(), where.slots.shape[1]
    h, active = x.new_empty(rows, 2 * hidden), x.new_empty(rows, hidden)
    by_copier = how.by_copier and _copies(gate_up, width)
    _up[(_programs(where, triton.cdiv(hidden, how.columns), how),)](
        x, _described(gate_up, how.columns, how.depth) if by_copier else gate_up, h, active, where.sources, where.ends,
        where.tiles, where.num_tiles, where.tiles.shape[1], width, hidden, top_k, by_copier, how.rows, how.columns,
        how.depth, num_warps=how.warps, num_stages=how.stages)
    return h, active


def down(rows: Tensor, weights: Tensor, where: Placement, how: Tiling, transposed: bool) -> Tensor:
    """rows @ weights, or, transposed, @ weights^T: [R, n]. rows: [R, k]; weights: [E, k, n], or [E, n, k]."""
    inner, columns = rows.shape[1], weights.shape[1 if transposed else 2]
    out = rows.new_empty(rows.shape[0], columns)
    by_copier = how.by_copier and _copies(rows, inner) and _copies(weights, columns) and inner % how.depth == 0
    block = (how.columns, how.depth) if transposed else (how.depth, how.columns)
    _down[(_programs(where, triton.cdiv(columns, how.columns), how),)](
        _described(rows, how.rows, how.depth) if by_copier else rows,
        _described(weights, *block) if by_copier else weights, out, where.ends, where.tiles, where.num_tiles,
        where.tiles.shape[1], inner, columns, transposed, by_copier, how.rows, how.columns, how.depth,
        num_warps=how.warps, num_stages=how.stages)
    return out


def down_backward(grad: Tensor, down_weight: Tensor, weights: Tensor, h: Tensor, where: Placement,
                  how: Tiling) -> tuple[Tensor, Tensor, Tensor]:
    """Back through the weighting, the second product and the activation, which is computed again from h.

    grad: [N, d]; down_weight: [E, d, f]; weights: [N, top_k] float32; h: [R, 2f].
    Returns (parts [column tiles, R] float32, whose sum is the gradient of each row's weight; the gradient of h;
    [R, f], the activation times its row's weight, as the gradient of down_weight needs it).
    """
    width, hidden = down_weight.shape[1:]
    column_tiles = triton.cdiv(hidden, how.columns)
    programs = _programs(where, column_tiles, how)
    by_copier = how.by_copier and _copies(down_weight, hidden) and width % how.depth == 0
    parts = torch.empty(column_tiles, h.shape[0], dtype=torch.float32, device=h.device)
    h_grad, weighted = torch.empty_like(h), h.new_empty(h.shape[0], hidden)
    _down_backward[(programs,)](
        grad, _described(down_weight, how.depth, how.columns) if by_copier else down_weight, weights, h, parts, h_grad,
        weighted, where.sources, where.ends, where.tiles, where.num_tiles, where.tiles.shape[1], h.shape[0], width,
        hidden, weights.shape[1], by_copier, how.rows, how.columns, how.depth, num_warps=how.warps,
        num_stages=how.stages)
    return parts, h_grad, weighted


def weight_gradient(left: Tensor, right: Tensor, where: Placement, gathered: str, how: Tiling) -> Tensor:
    """left^T @ right over the rows of each expert: [E, m, n]. One of the two is sorted, [R, ...]; `gathered` ("left"
    or "right") stands in the order of tokens, [N, ...]. An expert without rows gets zeros."""
    num_experts, height, columns = len(where.ends), left.shape[1], right.shape[1]
    out = left.new_empty(num_experts, height, columns)
    in_order, part = (right, how.columns) if gathered == "left" else (left, how.rows)
    by_copier = how.by_copier and _copies(in_order, in_order.shape[1])
    tiles = num_experts * triton.cdiv(height, how.rows) * triton.cdiv(columns, how.columns)
    _weight_gradient[(min(tiles, how.per_multiprocessor * num_multiprocessors(out.device)),)](
        left, right, _described(in_order, how.depth, part) if by_copier else None, out, where.sources, where.ends,
        num_experts, height, columns, where.slots.shape[1], gathered == "left", by_copier, how.rows, how.columns,
        how.depth, num_warps=how.warps, num_stages=how.stages)
    return out


def _copies(tensor: Tensor, row: int) -> bool:
    """Whether the copy engine (TMA) can read rows of this length: they begin at multiples of 16 bytes."""
    return tensor.numel() > 0 and row * tensor.element_size() % 16 == 0 and tensor.data_ptr() % 16 == 0


def _described(tensor: Tensor, *block: int) -> TensorDescriptor:
    """All matrices below each other, of which the copy engine takes blocks."""
    return TensorDescriptor.from_tensor(tensor.flatten(0, -2), list(block))


def _programs(where: Placement, columns: int, how: Tiling) -> int:
    return min(where.tiles.shape[1] * columns, how.per_multiprocessor * num_multiprocessors(where.ends.device))


@triton.jit     # type: ignore[untyped-decorator]
def _tile(  # type: ignore[no-untyped-def]
        tile, count, ends, tiles, most_tiles, COLUMN_TILES: tl.constexpr, ROWS: tl.constexpr):
    """(expert, first row, rows, the same but none past the expert's last, live, column tile) of one of `count` row
    tiles times COLUMN_TILES. A token's row is read by all its column tiles at about the same time; where there are so
    many of those that an expert's whole matrix passes by meanwhile, several row tiles share them."""
    GROUP: tl.constexpr = 1 if COLUMN_TILES <= 32 else 8
    first = tile // (GROUP * COLUMN_TILES) * GROUP
    size = tl.minimum(count - first, GROUP)
    within = tile % (GROUP * COLUMN_TILES)
    index, column_tile = first + within % size, within // size
    expert = tl.load(tiles + index)
    first_row = tl.load(tiles + most_tiles + index)
    row = first_row + tl.arange(0, ROWS)
    stop = tl.load(ends + expert)
    return expert.to(tl.int64), first_row, row, tl.minimum(row, stop - 1), row < stop, column_tile


@triton.jit(do_not_specialize=["most_tiles"])     # type: ignore[untyped-decorator]
def _up(  # type: ignore[no-untyped-def]
        x, gate_up, h, a, sources, ends, tiles, num_tiles, most_tiles, WIDTH: tl.constexpr, HIDDEN: tl.constexpr,
        TOP_K: tl.constexpr, BY_COPIER: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr):
    column_tiles: tl.constexpr = (HIDDEN + COLUMNS - 1) // COLUMNS
    count = tl.load(num_tiles)
    for tile in range(tl.program_id(0), count * column_tiles, tl.num_programs(0)):
        expert, _, row, inside, live, column_tile = _tile(tile, count, ends, tiles, most_tiles, column_tiles, ROWS)
        token = (tl.load(sources + inside) // TOP_K).to(tl.int64)
        column = column_tile * COLUMNS + tl.arange(0, COLUMNS)
        lefts = x + token[:, None] * WIDTH
        gates = tl.zeros([ROWS, COLUMNS], tl.float32)
        ups = tl.zeros([ROWS, COLUMNS], tl.float32)
        for start in range(0, WIDTH, DEPTH):
            left = _left(lefts, start, WIDTH, DEPTH)
            first = expert * 2 * HIDDEN
            gate = _transposed(gate_up, first, column_tile, start, HIDDEN, WIDTH, COLUMNS, DEPTH, BY_COPIER)
            gates = tl.dot(left, gate, gates, input_precision="ieee")
            up = _transposed(gate_up, first + HIDDEN, column_tile, start, HIDDEN, WIDTH, COLUMNS, DEPTH, BY_COPIER)
            ups = tl.dot(left, up, ups, input_precision="ieee")
        there = live[:, None] & (column < HIDDEN)[None, :]
        place = h + row.to(tl.int64)[:, None] * (2 * HIDDEN) + column[None, :]
        rounded_gates, rounded_ups = gates.to(h.dtype.element_ty), ups.to(h.dtype.element_ty)
        tl.store(place, rounded_gates, mask=there)
        tl.store(place + HIDDEN, rounded_ups, mask=there)
        # From what was written, since backward sees nothing else.
        active = _silu(rounded_gates.to(tl.float32)) * rounded_ups.to(tl.float32)
        tl.store(a + row.to(tl.int64)[:, None] * HIDDEN + column[None, :], active.to(a.dtype.element_ty), mask=there)


@triton.jit
def _silu(gate):  # type: ignore[no-untyped-def]
    return gate / (1 + tl.exp(-gate))


@triton.jit     # type: ignore[untyped-decorator]
def _left(rows, start, K: tl.constexpr, DEPTH: tl.constexpr):  # type: ignore[no-untyped-def]
    """[rows, DEPTH]. rows: pointers to the beginning of each, [rows, 1]."""
    k = start + tl.arange(0, DEPTH)
    if K % DEPTH == 0:
        return tl.load(rows + k[None, :])
    return tl.load(rows + k[None, :], mask=(k < K)[None, :], other=0)


@triton.jit     # type: ignore[untyped-decorator]
def _transposed(  # type: ignore[no-untyped-def]
        weights, first, column_tile, start, N: tl.constexpr, K: tl.constexpr, COLUMNS: tl.constexpr,
        DEPTH: tl.constexpr, BY_COPIER: tl.constexpr):
    """[DEPTH, COLUMNS] of the transpose of a matrix [N, K], whose first row is row `first` of weights."""
    if BY_COPIER:
        right = weights.load([(first + column_tile * COLUMNS).to(tl.int32), start]).T
    else:
        column, k = column_tile * COLUMNS + tl.arange(0, COLUMNS), start + tl.arange(0, DEPTH)
        place = weights + (first + tl.minimum(column, N - 1)).to(tl.int64)[None, :] * K + k[:, None]
        right = tl.load(place) if K % DEPTH == 0 else tl.load(place, mask=(k < K)[:, None], other=0)
    return right


@triton.jit     # type: ignore[untyped-decorator]
def _straight(  # type: ignore[no-untyped-def]
        weights, first, column_tile, start, N: tl.constexpr, K: tl.constexpr, COLUMNS: tl.constexpr,
        DEPTH: tl.constexpr, BY_COPIER: tl.constexpr):
    """[DEPTH, COLUMNS] of a matrix [K, N] whose first row is row `first` of weights."""
    if BY_COPIER:
        right = weights.load([(first + start).to(tl.int32), column_tile * COLUMNS])
    else:
        column, k = column_tile * COLUMNS + tl.arange(0, COLUMNS), start + tl.arange(0, DEPTH)
        place = weights + (first + k).to(tl.int64)[:, None] * N + column[None, :]
        if K % DEPTH == 0 and N % COLUMNS == 0:
            right = tl.load(place)
        else:
            right = tl.load(place, mask=(k < K)[:, None] & (column < N)[None, :], other=0)
    return right


@triton.jit(do_not_specialize=["most_tiles"])     # type: ignore[untyped-decorator]
def _down(  # type: ignore[no-untyped-def]
        rows, weights, out, ends, tiles, num_tiles, most_tiles, K: tl.constexpr, N: tl.constexpr,
        TRANSPOSED: tl.constexpr, BY_COPIER: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
        DEPTH: tl.constexpr):
    column_tiles: tl.constexpr = (N + COLUMNS - 1) // COLUMNS
    count = tl.load(num_tiles)
    for tile in range(tl.program_id(0), count * column_tiles, tl.num_programs(0)):
        expert, first_row, row, inside, live, column_tile = _tile(tile, count, ends, tiles, most_tiles, column_tiles,
                                                                  ROWS)
        column = column_tile * COLUMNS + tl.arange(0, COLUMNS)
        sums = tl.zeros([ROWS, COLUMNS], tl.float32)
        for start in range(0, K, DEPTH):
            if BY_COPIER:
                left = rows.load([first_row, start])
            else:
                left = _left(rows + inside.to(tl.int64)[:, None] * K, start, K, DEPTH)
            if TRANSPOSED:
                right = _transposed(weights, expert * N, column_tile, start, N, K, COLUMNS, DEPTH, BY_COPIER)
            else:
                right = _straight(weights, expert * K, column_tile, start, N, K, COLUMNS, DEPTH, BY_COPIER)
            sums = tl.dot(left, right, sums, input_precision="ieee")
        tl.store(out + row.to(tl.int64)[:, None] * N + column[None, :], sums.to(out.dtype.element_ty),
                 mask=live[:, None] & (column < N)[None, :])


@triton.jit(do_not_specialize=["most_tiles", "all_rows"])     # type: ignore[untyped-decorator]
def _down_backward(  # type: ignore[no-untyped-def]
        grad, down_weight, weights, h, weights_grad, h_grad, weighted, sources, ends, tiles, num_tiles, most_tiles,
        all_rows, WIDTH: tl.constexpr, HIDDEN: tl.constexpr, TOP_K: tl.constexpr, BY_COPIER: tl.constexpr,
        ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr):
    column_tiles: tl.constexpr = (HIDDEN + COLUMNS - 1) // COLUMNS
    count = tl.load(num_tiles)
    for tile in range(tl.program_id(0), count * column_tiles, tl.num_programs(0)):
        expert, _, row, inside, live, column_tile = _tile(tile, count, ends, tiles, most_tiles, column_tiles, ROWS)
        source = tl.load(sources + inside)
        column = column_tile * COLUMNS + tl.arange(0, COLUMNS)
        lefts = grad + (source // TOP_K).to(tl.int64)[:, None] * WIDTH
        a_grad = tl.zeros([ROWS, COLUMNS], tl.float32)
        for start in range(0, WIDTH, DEPTH):
            right = _straight(down_weight, expert * WIDTH, column_tile, start, HIDDEN, WIDTH, COLUMNS, DEPTH, BY_COPIER)
            a_grad = tl.dot(_left(lefts, start, WIDTH, DEPTH), right, a_grad, input_precision="ieee")
        weight = tl.load(weights + source)
        # In parts, since a whole tile of gate, up and gradient does not fit into registers.
        left, right = _halves(a_grad, ROWS, COLUMNS)
        one, two = _halves(left, ROWS, COLUMNS // 2)
        three, four = _halves(right, ROWS, COLUMNS // 2)
        part: tl.constexpr = COLUMNS // 4
        column = column_tile * COLUMNS + tl.arange(0, part)
        weight_grad = _back_through(one, weight, h, h_grad, weighted, row, live, column, HIDDEN)
        weight_grad += _back_through(two, weight, h, h_grad, weighted, row, live, column + part, HIDDEN)
        weight_grad += _back_through(three, weight, h, h_grad, weighted, row, live, column + 2 * part, HIDDEN)
        weight_grad += _back_through(four, weight, h, h_grad, weighted, row, live, column + 3 * part, HIDDEN)
        tl.store(weights_grad + tl.cast(column_tile, tl.int64) * all_rows + row, weight_grad, mask=live)


@triton.jit     # type: ignore[untyped-decorator]
def _halves(values, ROWS: tl.constexpr, COLUMNS: tl.constexpr):  # type: ignore[no-untyped-def]
    return tl.split(tl.permute(tl.reshape(values, [ROWS, 2, COLUMNS // 2]), [0, 2, 1]))


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
