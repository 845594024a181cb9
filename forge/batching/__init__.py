"""batching: which tokens form a row, and which rows form a global batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol, runtime_checkable

if TYPE_CHECKING:
    from torch import Tensor

    from forge.data import Source


class Piece(NamedTuple):
    """Tokens [start, stop) of one sample."""

    sample: int
    start: int
    stop: int


Row = tuple[Piece, ...]


class Plan(Protocol):
    """The global batches of one epoch, in order. The same for any number of ranks and workers.

    A row may be empty. A plan whose rows do not all take the same room states `kinds`, [len]: the global batches of one
    kind have tensors of one shape, so evaluation puts only those together.
    """

    def __len__(self) -> int: ...
    def __getitem__(self, index: int) -> Sequence[Row]: ...


@runtime_checkable
class Batching(Protocol):
    """An option that makes batches of other fields than tokens, and the pictures of conversations, states
    `takes_fields = True`; for others data=shards refuses to read them."""

    def plan(self, source: Source, seed: int, epoch: int, global_batch: int) -> Plan:
        """A pure function of its arguments. Raises ConfigError where the source has no full global batch."""
        ...

    def collate(self, rows: Sequence[Row], source: Source) -> dict[str, Tensor]:
        """The tensors of one micro-batch (see forge.batch.Batch)."""
        ...
