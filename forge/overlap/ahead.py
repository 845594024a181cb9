"""Reading ahead: which batch is sent next, while others are handed out."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from forge.batch import Batch, Work
    from forge.overlap.lane import Arrival, Lane


@dataclass(eq=False)
class Read:
    """Work that was read from the host: what of it is still there, and what is on its way to the device."""

    work: Work
    here: deque[Batch]
    sent: deque[Arrival] = field(default_factory=deque)


@dataclass(eq=False)
class Ahead:
    """Keeps `depth` batches on their way, beyond the one handed out last.

    Work is read only when work is asked for, where waiting for the data is counted as such: then as many works more as
    hold `depth` batches beyond it. The cursor rides on the work, so reading ahead does not move the run's position.
    """

    source: Iterator[Work]
    lane: Lane
    depth: int
    reads: deque[Read] = field(default_factory=deque)       # works not handed out yet, in order

    def works(self) -> Iterator[Work]:
        while True:
            self._read_beyond(0)
            if not self.reads:
                return
            current = self.reads.popleft()
            self._read_beyond(self.depth)
            yield replace(current.work, batches=self._batches(current))

    def _batches(self, current: Read) -> Iterator[Batch]:
        while current.sent or current.here:
            if not current.sent:
                self._send(current)
            arrive = current.sent.popleft()
            self._fill(current)
            yield arrive()

    def _fill(self, current: Read) -> None:
        ahead = [current, *self.reads]
        missing = self.depth - sum(len(read.sent) for read in ahead)
        for read in ahead:
            while read.here and missing > 0:
                self._send(read)
                missing -= 1

    def _send(self, read: Read) -> None:
        read.sent.append(self.lane.send(read.here.popleft()))

    def _read_beyond(self, num_batches: int) -> None:
        """Read until the works not handed out hold that many batches, or there is one at least."""
        while not self.reads or sum(len(read.here) + len(read.sent) for read in self.reads) < num_batches:
            work = next(self.source, None)
            if work is None:
                return
            self.reads.append(Read(work, deque(work.batches)))
