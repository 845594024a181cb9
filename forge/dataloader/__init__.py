"""dataloader: when and in which process the work is read. What is read is decided by the feed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    from forge.batch import Cursor, Work
    from forge.feed import Feed
    from forge.hardware import Topology


class Reader(Protocol):
    """Endless work on the host, in the order of the plan."""

    def seek(self, cursor: Cursor) -> None:
        """Continue from here. Call before iterating."""
        ...

    def __iter__(self) -> Iterator[Work]: ...

    def close(self) -> None:
        """End worker processes, if there are any."""
        ...


@runtime_checkable
class DataLoader(Protocol):
    def build(self, feed: Feed, topology: Topology) -> Reader: ...
