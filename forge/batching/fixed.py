"""batching=fixed: all documents in one stream, cut into rows of equal length."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, overload

import numpy as np

from forge.batching import Piece, Plan, Row
from forge.batching.reading import read_order, shuffled_within
from forge.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

    from forge.config import Config
    from forge.data import Source


@dataclass(frozen=True)
class Fixed:
    """Documents are joined in an order drawn for each epoch and cut into windows of sequence_length + 1 tokens.

    Neighbouring windows share one token, so each token is predicted once. The windows of an epoch that fill no whole
    global batch (and fewer than sequence_length tokens behind the last) are left to the next epoch's other order.

    mask_documents: a token sees its own document only, and the first token of a document is not predicted.
    """

    sequence_length: int
    mask_documents: bool

    def plan(self, source: Source, seed: int, epoch: int, global_batch: int) -> Plan:
        if getattr(source, "whole", False):
            raise ConfigError(_CUTS)
        documents, blocks = read_order(source, seed, epoch)
        ends = np.cumsum(source.lengths[documents])
        num_tokens = int(ends[-1]) if len(ends) else 0
        num_windows = max(0, num_tokens - 1) // self.sequence_length
        if num_windows < global_batch:
            raise ConfigError(
                f"global_batch={global_batch} rows of sequence_length={self.sequence_length} take "
                f"{global_batch * self.sequence_length + 1} tokens and the text has {num_tokens}: give more text, or "
                f"lower global_batch to {max(1, num_windows)} or sequence_length to "
                f"{max(1, (num_tokens - 1) // global_batch)}.")
        starts = np.arange(num_windows) * self.sequence_length
        windows = shuffled_within(blocks[np.searchsorted(ends, starts, "right")], seed, epoch, "windows")
        return _Plan(self.sequence_length, documents, ends, windows, global_batch)

    def problems(self, config: Config) -> Iterator[str]:
        if getattr(config.data, "conversation", None) is not None:
            yield _CUTS

    def collate(self, rows: Sequence[Row], source: Source) -> dict[str, Tensor]:
        """rows: all of one length. See forge.batch.Batch for what comes out."""
        from forge.batching.rows import joined, masked  # here, because it imports torch

        rows = list(rows)
        tensors = joined(rows, source)
        return masked(rows, tensors) if self.mask_documents else tensors


_CUTS = ("batching=fixed cuts the stream of all samples into rows, and conversations (data.conversation) must not be "
         "cut: set batching=packed, or batching=bucketed.")


@dataclass(frozen=True, eq=False)
class _Plan(Sequence[Sequence[Row]]):
    """documents: [samples] the order in which they are joined; ends: [samples] where each ends in the stream;
    windows: the order in which windows are read."""

    sequence_length: int
    documents: np.ndarray
    ends: np.ndarray
    windows: np.ndarray
    global_batch: int

    def __len__(self) -> int:
        return len(self.windows) // self.global_batch

    @overload
    def __getitem__(self, index: int) -> Sequence[Row]: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Sequence[Row]]: ...
    def __getitem__(self, index: int | slice) -> Sequence[Row] | Sequence[Sequence[Row]]:
        if isinstance(index, slice):
            return [self[each] for each in range(*index.indices(len(self)))]
        if not 0 <= index < len(self):
            raise IndexError(f"global batch {index} of {len(self)}")
        return _Rows(self, self.windows[index * self.global_batch:(index + 1) * self.global_batch])

    def row(self, window: int) -> Row:
        start = window * self.sequence_length
        stop = start + self.sequence_length + 1
        first = int(np.searchsorted(self.ends, start, "right"))
        pieces = []
        while start < stop:
            end = int(self.ends[first])
            begin = int(self.ends[first - 1]) if first else 0
            pieces.append(Piece(int(self.documents[first]), start - begin, min(stop, end) - begin))
            start, first = end, first + 1
        return tuple(pieces)


@dataclass(frozen=True, eq=False)
class _Rows(Sequence[Row]):
    """The rows of one global batch. A rank takes a slice and finds the documents of no others."""

    plan: _Plan
    windows: np.ndarray

    def __len__(self) -> int:
        return len(self.windows)

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Row]: ...
    def __getitem__(self, index: int | slice) -> Row | Sequence[Row]:
        if isinstance(index, slice):
            return replace(self, windows=self.windows[index])
        return self.plan.row(int(self.windows[index]))
