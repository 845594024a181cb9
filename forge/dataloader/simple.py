"""dataloader=simple: read in this process, when it is asked for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from forge.dataloader import Reader

if TYPE_CHECKING:
    from forge.batch import Cursor, Work
    from forge.feed import Feed
    from forge.hardware import Topology


@dataclass(frozen=True)
class Simple:
    """No workers: the plain twin of the others, and enough where reading is quick."""

    def build(self, feed: Feed, topology: Topology) -> Reader:
        from forge.batch import Cursor  # here, because it imports torch

        return _InProcess(feed, Cursor())


class _InProcess:
    def __init__(self, feed: Feed, start: Cursor) -> None:
        self._feed = feed
        self._start = start

    def seek(self, cursor: Cursor) -> None:
        self._start = cursor

    def __iter__(self) -> Iterator[Work]:
        cursor = self._start
        while True:
            self._feed.coming(cursor)
            work = self._feed[cursor]
            yield work
            cursor = work.cursor

    def close(self) -> None:
        self._feed.close()
