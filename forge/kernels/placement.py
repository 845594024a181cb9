"""Which experts a token goes to, and where its rows stand among those of its experts: one launch (counting sort).

Row r of the sorted order belongs to choice `sources[r] = token * top_k + j`; rows of one expert are neighbours, in the
order of their tokens, as a stable sort by expert gives them. Choices that are dropped (expert id == num_experts) get
no row. The grid meets once, at a barrier between counting and placing, so all its programs must run at once: a
cooperative launch. In Triton's interpreter the grid is one program.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from forge.kernels import interpreted
from forge.kernels.choice import CELLS, Scores, at_once, cells_of, choose_experts, column_of
from forge.kernels.devices import num_multiprocessors

PROGRAMS = 32           # whose counts are added at a time


class Placement(NamedTuple):
    """Where N tokens with top_k choices stand. All int32.

    slots: [N, top_k], the row of each choice; -1: dropped. sources: [N * top_k], the choice of each row; only as many
    as are not dropped are written. ends: [num_experts], one past the last row of each expert. tiles: [2, most tiles]:
    expert and first row of each tile of `rows` rows. num_tiles: [1].
    """

    slots: Tensor
    sources: Tensor
    ends: Tensor
    tiles: Tensor
    num_tiles: Tensor


def place(experts: Tensor, num_experts: int, rows: int) -> Placement:
    """experts: [N, top_k] int64, distinct in a row but for num_experts, which means dropped. rows: of a tile."""
    return _launch(None, None, None, experts, None, num_experts, rows, Scores("given", False, 1.0))[0]


def choose_and_place(logits: Tensor, bias: Tensor, valid: Tensor, top_k: int, rows: int,
                     how: Scores) -> tuple[Tensor, Tensor, Tensor, Placement]:
    """logits: [N, num_experts] float32. bias: [num_experts] float32, which only the choice sees. valid: [N] bool.

    Returns (experts [N, top_k] int64, best first and the lower id first where scores tie; weights [N, top_k] float32;
    load [2, num_experts] float32, choices of valid tokens and of all; placement). Not a number counts as the highest
    score, and makes the weights not a number. The twins are forge.moe_router.choice.choose_experts and gate.choose.
    """
    experts = torch.empty(logits.shape[0], top_k, dtype=torch.int64, device=logits.device)
    weights = torch.empty(logits.shape[0], top_k, dtype=torch.float32, device=logits.device)
    placement, counts = _launch(logits, bias, valid, experts, weights, logits.shape[1], rows, how)
    return experts, weights, counts.sum(dim=1).float(), placement


def _launch(logits: Tensor | None, bias: Tensor | None, valid: Tensor | None, experts: Tensor, weights: Tensor | None,
            num_experts: int, rows: int, how: Scores) -> tuple[Placement, Tensor]:
    """(placement, counts [2, programs, num_experts] int32: each program's choices of valid tokens, and of all)"""
    assert experts.is_contiguous() and (logits is None or logits.is_contiguous())
    tokens, top_k = experts.shape
    device, choices = experts.device, experts.numel()
    programs = 1 if interpreted() else num_multiprocessors(device)
    most_tiles = choices // rows + num_experts
    slots = torch.empty(tokens, top_k, dtype=torch.int32, device=device)
    sources = torch.empty(choices, dtype=torch.int32, device=device)
    ends, num_tiles = (torch.empty(size, dtype=torch.int32, device=device) for size in (num_experts, 1))
    tiles = torch.empty(2, most_tiles, dtype=torch.int32, device=device)
    counts = torch.empty(2, programs, num_experts, dtype=torch.int32, device=device)
    arrived = torch.zeros(1, dtype=torch.int32, device=device)
    _place[(programs,)](
        logits, bias, valid, experts, weights, slots, sources, ends, tiles, num_tiles, counts, arrived, tokens,
        most_tiles, how.scale, num_experts, top_k, how.score, how.normalize, rows,
        at_once(num_experts, CELLS), at_once(num_experts, 4 * CELLS),
        triton.next_power_of_2(num_experts), triton.next_power_of_2(top_k), PROGRAMS,
        num_warps=8, launch_cooperative_grid=not interpreted())
    return Placement(slots, sources, ends, tiles, num_tiles), counts


@triton.jit(do_not_specialize=["tokens", "most_tiles"])     # type: ignore[untyped-decorator]
def _place(  # type: ignore[no-untyped-def]
        logits, bias, valid, experts, weights, slots, sources, ends, tiles, num_tiles, counts, arrived, tokens,
        most_tiles, scale, E: tl.constexpr, K: tl.constexpr, SCORE: tl.constexpr, NORMALIZE: tl.constexpr,
        ROWS: tl.constexpr, TOKENS: tl.constexpr, TILES: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_K: tl.constexpr,
        PROGRAMS: tl.constexpr):
    program, programs = tl.program_id(0), tl.num_programs(0)
    chunk = tl.cdiv(tl.cdiv(tokens, programs), TOKENS) * TOKENS         # whole blocks, so that each is one program's
    first, last = program * chunk, tl.minimum((program + 1) * chunk, tokens)
    expert = tl.arange(0, BLOCK_E)
    running = tl.zeros([BLOCK_E], tl.int32)                             # this program's choices so far
    load = tl.zeros([BLOCK_E], tl.int32)                                # and those of valid tokens
    for start in range(first, last, TOKENS):
        token = start + tl.arange(0, TOKENS)
        if SCORE == "given":
            ids = _ids(experts, token, last, E, K, BLOCK_K)
        else:
            ids = choose_experts(logits, bias, weights, experts, token, last, scale, E, K, SCORE, NORMALIZE, BLOCK_E,
                                 BLOCK_K)
        chosen = tl.zeros([TOKENS, BLOCK_E], tl.int32)
        for j in range(K):
            chosen += (column_of(ids, j, BLOCK_K)[:, None] == expert[None, :]).to(tl.int32)
        chosen = tl.where((token < last)[:, None] & (expert < E)[None, :], chosen, 0)
        before = tl.cumsum(chosen, axis=0) - chosen + running[None, :]
        _add_to_slots(slots, ids, before, token, last, E, K, BLOCK_E, BLOCK_K, True)
        running += tl.sum(chosen, axis=0)
        if SCORE != "given":
            counted = tl.load(valid + token, mask=token < last, other=0).to(tl.int32)
            load += tl.sum(chosen * counted[:, None], axis=0)
    tl.store(counts + program * E + expert, load, mask=expert < E)
    of_all = counts + programs * E
    tl.store(of_all + program * E + expert, running, mask=expert < E)
    _meet(arrived, programs)
    total, base = _totals(of_all, program, programs, E, BLOCK_E, PROGRAMS)
    for start in range(first, last, TOKENS):
        token = start + tl.arange(0, TOKENS)
        ids = _ids(experts, token, last, E, K, BLOCK_K)
        slot = _add_to_slots(slots, ids, tl.broadcast_to(base[None, :], [TOKENS, BLOCK_E]), token, last, E, K, BLOCK_E,
                             BLOCK_K, False)
        cell, there = cells_of(token, last, K, BLOCK_K)
        tl.store(sources + slot, cell.to(tl.int32), mask=there & (ids < E))
    if program == 0:
        tl.store(ends + expert, tl.cumsum(total, axis=0), mask=expert < E)
    _lay_tiles(tiles, num_tiles, total, most_tiles, program, programs, E, ROWS, TILES, BLOCK_E)


@triton.jit     # type: ignore[untyped-decorator]
def _ids(experts, token, last, E: tl.constexpr, K: tl.constexpr, BLOCK_K: tl.constexpr):  # type: ignore[no-untyped-def]
    cell, there = cells_of(token, last, K, BLOCK_K)
    return tl.load(experts + cell, mask=there, other=E).to(tl.int32)


@triton.jit     # type: ignore[untyped-decorator]
def _add_to_slots(  # type: ignore[no-untyped-def]
        slots, ids, values, token, last, E: tl.constexpr, K: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_K: tl.constexpr,
        FIRST: tl.constexpr):
    """Adds values [tokens, BLOCK_E] of each choice's expert; at last, what is dropped has no slot."""
    cell, there = cells_of(token, last, K, BLOCK_K)
    expert, choice = tl.arange(0, BLOCK_E), tl.arange(0, BLOCK_K)
    slot = tl.zeros_like(ids) if FIRST else tl.load(slots + cell, mask=there, other=0)
    for j in range(K):
        mine = column_of(ids, j, BLOCK_K)[:, None] == expert[None, :]
        found = tl.sum(tl.where(mine, values, 0), axis=1)
        slot += tl.where(choice[None, :] == j, found[:, None], 0)
    tl.store(slots + cell, slot if FIRST else tl.where(ids < E, slot, -1), mask=there)
    return slot


@triton.jit
def _meet(arrived, programs):  # type: ignore[no-untyped-def]
    """What any program wrote before is seen by all after."""
    tl.debug_barrier()                                                  # all of this program's writes, then its arrival
    tl.atomic_add(arrived, 1, sem="acq_rel")
    while tl.atomic_add(arrived, 0, sem="acq_rel") < programs:
        pass
    tl.debug_barrier()


@triton.jit     # type: ignore[untyped-decorator]
def _totals(  # type: ignore[no-untyped-def]
        counts, program, programs, E: tl.constexpr, BLOCK_E: tl.constexpr, PROGRAMS: tl.constexpr):
    """(choices of each expert, the slot of this program's first), both [BLOCK_E]."""
    expert = tl.arange(0, BLOCK_E)
    total, base = tl.zeros([BLOCK_E], tl.int32), tl.zeros([BLOCK_E], tl.int32)
    for start in range(0, programs, PROGRAMS):
        row = start + tl.arange(0, PROGRAMS)
        inside = (row < programs)[:, None] & (expert < E)[None, :]
        found = tl.load(counts + row[:, None] * E + expert[None, :], mask=inside, other=0,
                        cache_modifier=".cg")                           # not from this multiprocessor's own cache
        total += tl.sum(found, axis=0)
        base += tl.sum(tl.where((row < program)[:, None], found, 0), axis=0)
    return total, base + tl.cumsum(total, axis=0) - total


@triton.jit     # type: ignore[untyped-decorator]
def _lay_tiles(  # type: ignore[no-untyped-def]
        tiles, num_tiles, total, most_tiles, program, programs, E: tl.constexpr, ROWS: tl.constexpr,
        TILES: tl.constexpr, BLOCK_E: tl.constexpr):
    expert = tl.arange(0, BLOCK_E)
    own = (total + ROWS - 1) // ROWS
    stop = tl.cumsum(own, axis=0)
    row = tl.cumsum(total, axis=0) - total
    for start in range(program * TILES, most_tiles, programs * TILES):
        tile = start + tl.arange(0, TILES)
        passed = (stop[None, :] <= tile[:, None]) & (expert < E)[None, :]
        owner = tl.sum(passed.to(tl.int32), axis=1)
        mine = owner[:, None] == expert[None, :]
        begin = tl.sum(tl.where(mine, row[None, :], 0), axis=1)
        earlier = tl.sum(tl.where(mine, (stop - own)[None, :], 0), axis=1)
        used = (owner < E) & (tile < most_tiles)
        tl.store(tiles + tile, owner, mask=used)
        tl.store(tiles + most_tiles + tile, begin + (tile - earlier) * ROWS, mask=used)
    if program == 0:
        tl.store(num_tiles, tl.sum(own, axis=0))
