"""batching=bucketed: documents of like length together, a document a row, padded to the edge of their bucket."""

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
class Bucketed:
    """An update holds documents of one bucket. Each of its rows is a budget of sequence_length places, spent on as many
    documents as fit: sequence_length // edge, each padded to the edge. So every pass of every rank holds about the same
    number of tokens, whatever the bucket, and a row of the plan is a few rows of a tensor.

    Every document is read once an epoch, one longer than sequence_length in parts. The documents of a bucket are shared
    evenly by its updates, which are filled up with empty rows.

    edges: the longest documents of each bucket, in places (a document of n tokens takes n - 1: its last is only
        predicted). Those above sequence_length are not used, and sequence_length is always the last.
    """

    sequence_length: int
    edges: list[int]

    def plan(self, source: Source, seed: int, epoch: int, global_batch: int) -> Plan:
        parts = parts_of(source, self.sequence_length, seed, epoch)
        buckets = np.searchsorted(self.used, parts.sizes)
        updates: list[np.ndarray] = []
        for bucket, edge in enumerate(self.used):
            members = np.flatnonzero(buckets == bucket)
            number = -(-len(members) // (global_batch * self.documents_in_row(edge)))
            if number:
                updates += np.split(members, np.cumsum(shares(len(members), number))[:-1])
        updates.sort(key=lambda update: int(parts.blocks[update[0]]))
        blocks = parts.blocks[[update[0] for update in updates]]
        updates = [updates[index] for index in shuffled_within(blocks, seed, epoch, "updates")]
        sizes = np.concatenate([shares(len(update), global_batch) for update in updates])
        kinds = np.array([buckets[update[0]] for update in updates])
        return PartsPlan(parts.taken(np.concatenate(updates)), np.cumsum(sizes), global_batch, kinds)

    def collate(self, rows: Sequence[Row], source: Source) -> dict[str, Tensor]:
        """One shape for each bucket. See forge.batch.Batch; "lengths" are among the tensors."""
        from forge.batching.rows import one_below_another  # here, because it imports torch

        edge = self.edge_of(max((piece.stop - piece.start - 1 for row in rows for piece in row), default=1))
        return one_below_another(rows, self.documents_in_row(edge), edge, source)

    def problems(self, config: Config) -> Iterator[str]:
        if not self.edges or self.edges != sorted(set(self.edges)) or self.edges[0] < 1:
            yield (f"batching.edges={self.edges}: lengths from 1 on are wanted, each above the one before it: "
                   f"[64, 128, 256], for example.")
        if config.choices.get("passes") == "graphed":
            yield ("batching=bucketed has batches of several shapes, and passes=graphed records one: set "
                   "passes=in_turn, or batching=packed.")

    @property
    def used(self) -> list[int]:
        return [edge for edge in self.edges if edge < self.sequence_length] + [self.sequence_length]

    def edge_of(self, size: int) -> int:
        """Of the bucket of a document of `size` places, at most sequence_length."""
        return next(edge for edge in self.used if size <= edge)

    def documents_in_row(self, edge: int) -> int:
        return self.sequence_length // edge
