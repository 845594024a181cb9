"""Rows that predict unequal numbers of targets, so that a mean of means shows itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from forge.batch import IGNORED

if TYPE_CHECKING:
    from torch import Tensor

    from forge.batching import Batching, Plan
    from forge.data import Source


@dataclass(frozen=True)
class Uneven:
    """A batching option around another: of the n rows of an update, row i does not predict its first i / 2n tokens.

    The rows are the same however they are cut into micro-batches and shared by ranks.
    """

    inner: Batching

    def plan(self, source: Source, seed: int, epoch: int, global_batch: int) -> Plan:
        return _Numbered(self.inner.plan(source, seed, epoch, global_batch))

    def collate(self, rows: Sequence[Any], source: Source) -> dict[str, Tensor]:
        tensors = self.inner.collate([row.row for row in rows], source)
        targets = tensors["targets"]
        hidden = torch.tensor([row.place * targets.shape[1] // (2 * row.of) for row in rows])
        hidden = hidden.repeat_interleave(len(targets) // len(rows))        # a row may hold several of the tensor's
        ignored = torch.arange(targets.shape[1]) < hidden.unsqueeze(1)
        return tensors | {"targets": targets.masked_fill(ignored, IGNORED)}


@dataclass(frozen=True)
class _Placed:
    row: Any
    place: int
    of: int


@dataclass(frozen=True, eq=False)
class _Numbered:
    inner: Plan

    def __len__(self) -> int:
        return len(self.inner)

    def __getitem__(self, index: int) -> Any:
        rows = self.inner[index]
        return [_Placed(row, place, len(rows)) for place, row in enumerate(rows)]
