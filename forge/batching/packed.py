"""batching=packed: whole documents side by side in rows of equal length, each seeing itself alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from forge.batching import Plan, Row
from forge.batching.parts import PartsPlan, parts_of, shares
from forge.batching.reading import shuffled_within

if TYPE_CHECKING:
    from torch import Tensor

    from forge.config import Config
    from forge.data import Source


@dataclass(frozen=True)
class Packed:
    """Documents are drawn in an order of each epoch, `pool` at a time, and each goes into the fullest row that has room
    for it, longest first (best-fit decreasing). One longer than a row is cut into parts, and a part is a document.

    Every document is read once an epoch. Rows are shared evenly by the updates, which are filled up with empty rows.
    Positions begin anew with each document, attention stays inside it, and its first token is not predicted.

    pool: documents that are packed together. More leave less padding; fewer leave more to chance which meet in a row.
    """

    sequence_length: int
    pool: int

    def plan(self, source: Source, seed: int, epoch: int, global_batch: int) -> Plan:
        parts = parts_of(source, self.sequence_length, seed, epoch)
        every = parts.sizes
        pools = [best_fit(every[first:first + self.pool], self.sequence_length, first)
                 for first in range(0, len(parts), self.pool)]
        rows = [row for pool in pools for row in pool]
        blocks = np.repeat(parts.blocks[::self.pool], [len(pool) for pool in pools])
        order = shuffled_within(blocks, seed, epoch, "rows")
        sizes = np.zeros((-(-len(rows) // global_batch), global_batch), np.int64)
        sizes[np.arange(global_batch) < shares(len(rows), len(sizes))[:, None]] = [len(rows[row]) for row in order]
        packed = parts.taken(np.concatenate([rows[row] for row in order]))
        return PartsPlan(packed, np.cumsum(sizes), global_batch, kinds=np.zeros(len(sizes), np.int64))

    def collate(self, rows: Sequence[Row], source: Source) -> dict[str, Tensor]:
        """See forge.batch.Batch: all of it, "lengths" too."""
        from forge.batching.rows import side_by_side  # here, because it imports torch

        return side_by_side(rows, self.sequence_length, source)

    def problems(self, config: Config) -> Iterator[str]:
        if self.pool < 1:
            yield f"batching.pool={self.pool}: at least 1 is wanted; 1024, for example."


def best_fit(sizes: np.ndarray, capacity: int, first: int = 0) -> list[list[int]]:
    """Rows of the indices of sizes, counted from `first`. No size is above capacity.

    Bit n of `open_rooms` is set where a row has room for n more, so that the tightest room is found in one step.
    """
    rows: list[list[int]] = []
    with_room: list[list[int]] = [[] for _ in range(capacity + 1)]
    open_rooms = 0
    for index in np.argsort(-sizes, kind="stable").tolist():
        size = int(sizes[index])
        fitting = open_rooms >> size
        if fitting:
            room = size + (fitting & -fitting).bit_length() - 1
            row = with_room[room].pop()
            if not with_room[room]:
                open_rooms ^= 1 << room
        else:
            room, row = capacity, len(rows)
            rows.append([])
        rows[row].append(first + index)
        with_room[room - size].append(row)
        open_rooms |= 1 << room - size
    return rows
