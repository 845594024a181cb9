"""Documents as they are put into rows whole, and the plans that hold them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, overload

import numpy as np

from forge.batching import Piece, Row
from forge.batching.reading import read_order, shuffled_within
from forge.errors import ConfigError
from forge.notes import say

if TYPE_CHECKING:
    from forge.data import Source


@dataclass(frozen=True, eq=False)
class Parts:
    """Documents that fit into a row, and the parts of those that do not: tokens [starts, stops) of samples. blocks: the
    shuffle window of each (see forge.batching.reading). All [parts] int64."""

    samples: np.ndarray
    starts: np.ndarray
    stops: np.ndarray
    blocks: np.ndarray

    def __len__(self) -> int:
        return len(self.samples)

    @property
    def sizes(self) -> np.ndarray:
        """[parts]: the places that each takes in a row. Its last token is only predicted, so it takes none."""
        sizes: np.ndarray = self.stops - self.starts - 1
        return sizes

    def taken(self, order: np.ndarray) -> Parts:
        return Parts(self.samples[order], self.starts[order], self.stops[order], self.blocks[order])

    def piece(self, index: int) -> Piece:
        return Piece(int(self.samples[index]), int(self.starts[index]), int(self.stops[index]))


def parts_of(source: Source, most: int, seed: int, epoch: int) -> Parts:
    """The documents of an epoch in the order in which they are read, longer ones cut into parts of `most` places, which
    are shuffled with the others. Neighbouring parts share one token, so each token but a document's first is predicted
    once. Raises ConfigError where there is nothing to predict."""
    documents, blocks = read_order(source, seed, epoch)
    lengths = np.asarray(source.lengths, np.int64)[documents]
    counts = -(-np.maximum(lengths - 1, 0) // most)
    if not counts.any():
        raise ConfigError(f"None of the {len(lengths):,} documents in the data has two tokens or more, so there is "
                          f"nothing to predict: name other data, or set batching=fixed, which joins documents.")
    if getattr(source, "whole", False) and counts.max() > 1:
        raise ConfigError(f"A sample of {lengths.max()} tokens does not fit into a row of {most} places, and samples "
                          f"of these data are not cut: set sequence_length={lengths.max() - 1}, or lower "
                          "data.conversation.max_length.")
    if left_out := int((counts == 0).sum()):
        say(f"{left_out:,} of {len(lengths):,} documents have fewer than two tokens: nothing in them can be predicted, "
            f"so they are left out.")
    which = np.repeat(np.arange(len(lengths)), counts)
    starts = (np.arange(len(which)) - np.repeat(np.cumsum(counts) - counts, counts)) * most
    stops = np.minimum(starts + most + 1, lengths[which])
    order = shuffled_within(blocks[which], seed, epoch, "parts")
    return Parts(documents[which], starts, stops, blocks[which]).taken(order)


@dataclass(frozen=True, eq=False)
class PartsPlan(Sequence[Sequence[Row]]):
    """A plan whose rows hold whole parts.

    parts: in the order of the rows. ends: [global batches * global_batch] where each row ends among the parts; a row
    may be empty. Row `index` of global batch `number` is number * global_batch + index. kinds: see forge.batching.Plan.
    """

    parts: Parts
    ends: np.ndarray
    global_batch: int
    kinds: np.ndarray

    def __len__(self) -> int:
        return len(self.ends) // self.global_batch

    @overload
    def __getitem__(self, index: int) -> Sequence[Row]: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Sequence[Row]]: ...
    def __getitem__(self, index: int | slice) -> Sequence[Row] | Sequence[Sequence[Row]]:
        if isinstance(index, slice):
            return [self[each] for each in range(*index.indices(len(self)))]
        if not 0 <= index < len(self):
            raise IndexError(f"global batch {index} of {len(self)}")
        return _Rows(self, range(index * self.global_batch, (index + 1) * self.global_batch))

    def row(self, number: int) -> Row:
        first = int(self.ends[number - 1]) if number else 0
        return tuple(self.parts.piece(index) for index in range(first, int(self.ends[number])))


@dataclass(frozen=True, eq=False)
class _Rows(Sequence[Row]):
    """The rows of one global batch; a slice makes no row."""

    plan: PartsPlan
    numbers: range

    def __len__(self) -> int:
        return len(self.numbers)

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Row]: ...
    def __getitem__(self, index: int | slice) -> Row | Sequence[Row]:
        if isinstance(index, slice):
            return replace(self, numbers=self.numbers[index])
        return self.plan.row(self.numbers[index])


def shares(count: int, into: int) -> np.ndarray:
    """[into]: sizes that add up to count and differ by one at most, the larger first."""
    return count // into + (np.arange(into) < count % into)
