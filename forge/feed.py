"""What is read for an update: a pure function of the position in the data."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import torch

from forge.batch import IGNORED, Batch, Cursor, Work
from forge.batching import Batching, Plan, Row
from forge.batching.plans import Plans
from forge.data import Source

_PLANNED_AHEAD = 64     # updates before the end of an epoch, from which on the next is planned


def as_read(batch: Batch) -> Batch:
    return batch


@dataclass(frozen=True, eq=False)
class Feed:
    """Reads the work of any position, for one of `data_size` readers that share each global batch.

    Which rows belong together depends on (seed, epoch, index) alone, so the data of an update are the same for any
    number of ranks and workers.

    read: what the augmentation does to a batch in the process that reads it.
    """

    source: Source
    batching: Batching
    seed: int
    global_batch: int           # rows in an update, over all ranks
    micro_batch: int            # rows in one forward pass of one rank
    data_rank: int
    data_size: int
    read: Callable[[Batch], Batch] = as_read

    def __getitem__(self, cursor: Cursor) -> Work:
        rows = self._rows(cursor)
        batches = [self._batch(rows[first:first + self.micro_batch], cursor, micro)
                   for micro, first in enumerate(range(0, len(rows), self.micro_batch))]
        return Work(sum(batch.num_targets for batch in batches), batches, self.after(cursor))

    def coming(self, cursor: Cursor) -> None:
        """Tell the source that this process is about to read here and goes on from here. What is read once, out of
        turn, is not told: nobody would say later that it is done with."""
        self.nearing(cursor)
        if (coming := getattr(self.source, "coming", None)) is not None:
            coming(self.seed, cursor.epoch, [piece.sample for row in self._rows(cursor) for piece in row])

    def _rows(self, cursor: Cursor) -> Sequence[Row]:
        return self.plan(cursor.epoch)[cursor.index][self.data_rank::self.data_size]

    def after(self, cursor: Cursor) -> Cursor:
        """The position that follows, in this epoch or the next."""
        if cursor.index + 1 < len(self.plan(cursor.epoch)):
            return Cursor(cursor.epoch, cursor.index + 1)
        return Cursor(cursor.epoch + 1, 0)

    def before(self, cursor: Cursor) -> Cursor:
        """The position that it follows. There is none before the first."""
        if cursor.index > 0:
            return Cursor(cursor.epoch, cursor.index - 1)
        return Cursor(cursor.epoch - 1, len(self.plan(cursor.epoch - 1)) - 1)

    def plan(self, epoch: int) -> Plan:
        return self._plans[epoch]

    def nearing(self, cursor: Cursor) -> None:
        """This process has come here: where the epoch is nearly over, a thread plans the next."""
        if cursor.index + _PLANNED_AHEAD >= len(self.plan(cursor.epoch)):
            self._plans.prepare(cursor.epoch + 1)

    def close(self) -> None:
        """See Plans.close."""
        self._plans.close()

    @cached_property
    def _plans(self) -> Plans:
        return Plans(partial(_plan, self.batching, self.source, self.seed, self.global_batch))

    def _batch(self, rows: Sequence[Row], cursor: Cursor, micro: int) -> Batch:
        tensors = self.batching.collate(rows, self.source)
        place = f"{self.seed}:{cursor.epoch}:{cursor.index}:{micro}:{self.data_rank}"
        if (samples := tensors.pop("picture_samples", None)) is not None:
            tensors["picture_seeds"] = torch.tensor([_hashed(f"{self.seed}:{cursor.epoch}:{sample}:{number}")
                                                     for sample, number in samples.tolist()], dtype=torch.int64)
        dropped = getattr(self.source, "dropped", None)
        return self.read(Batch(tensors, int((tensors["targets"] != IGNORED).sum()), _hashed(place),
                               dropped and dropped.taken()))


def _hashed(place: str) -> int:
    return int.from_bytes(hashlib.blake2b(place.encode(), digest_size=7).digest())


def _plan(batching: Batching, source: Source, seed: int, global_batch: int, epoch: int) -> Plan:
    return batching.plan(source, seed, epoch, global_batch)
