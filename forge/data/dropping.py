"""Bad samples: counted by reason and shard, told, and the end of a run where there are too many."""

from __future__ import annotations

import mmap
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from forge.data.storage import Location
from forge.errors import UnreadableError
from forge.notes import say

_LISTED = 8         # reasons or shards in a sentence


class BadSample(UnreadableError):
    """A sample that cannot be read. reason: of few kinds, so that it can be counted."""

    def __init__(self, shard: int, reason: str, sentence: str) -> None:
        super().__init__(sentence)
        self.shard, self.reason = shard, reason

    def __reduce__(self) -> tuple[type[BadSample], tuple[int, str, str]]:
        return BadSample, (self.shard, self.reason, str(self))


@dataclass(frozen=True)
class Bound:
    """share: of samples that may be bad. floor: so many bad ones never end a run, however few samples there are."""

    share: float
    floor: int

    def passed(self, num_bad: int, num_tried: int) -> bool:
        return num_bad > self.floor and num_bad > self.share * num_tried

    def __str__(self) -> str:
        return f"data.max_bad={self.share} and data.bad_floor={self.floor}"


class Dropped:
    """What was dropped of some shards.

    By `missed`, when they are opened, on what the index knows; by `failed`, when a sample is read. Reads are counted
    over all worker processes of a rank that were forked from this one, each sample once for each time it is read.
    """

    def __init__(self, shards: Sequence[Location], bound: Bound) -> None:
        self.shards, self.bound = list(shards), bound
        self.counts: Counter[tuple[str, int]] = Counter()       # (reason, number of the shard)
        self._first: dict[tuple[str, int], int] = {}            # the byte where it was seen first
        self._shared = _shared(2)

    def missed(self, shard: int, reason: str, offset: int) -> None:
        self.counts[reason, shard] += 1
        self._first.setdefault((reason, shard), offset)

    def opened(self, num_kept: int) -> None:
        """All shards are open. Raises UnreadableError where too much of them is bad."""
        if num_bad := self.counts.total():
            say(f"Dropped {self.sentence()}.")
            self._judge(num_bad, num_kept + num_bad, self.sentence())

    def tried(self) -> None:
        self._shared[0] += 1

    def failed(self, bad: BadSample) -> None:
        """Say it, and count it. Raises UnreadableError where too many were bad."""
        self.counts[bad.reason, bad.shard] += 1
        self._shared[1] += 1
        say(f"Dropped a sample, another takes its place: {bad}")
        self._judge(int(self._shared[1]), int(self._shared[0]), f"of late: {bad}")

    def sentence(self) -> str:
        """All counts, by reason and shard."""
        reasons: Counter[str] = Counter()
        for (reason, _), count in self.counts.items():
            reasons[reason] += count
        return "; ".join(f"{count:,} for {reason} ({self._where(reason)})" for reason, count in
                         reasons.most_common(_LISTED))

    def _where(self, reason: str) -> str:
        found = Counter({shard: count for (why, shard), count in self.counts.items() if why == reason})
        listed = ", ".join(f"{count:,} in {self.shards[shard]}{self._byte(reason, shard, count)}"
                           for shard, count in found.most_common(_LISTED))
        return listed + (f", and in {len(found) - _LISTED:,} more shards" if len(found) > _LISTED else "")

    def _byte(self, reason: str, shard: int, count: int) -> str:
        if (offset := self._first.get((reason, shard))) is None:
            return ""
        return f", byte {offset}" if count == 1 else f", the first at byte {offset}"

    def _judge(self, num_bad: int, num_tried: int, what: str) -> None:
        if self.bound.passed(num_bad, num_tried):
            raise UnreadableError(f"{num_bad:,} of {num_tried:,} samples are bad, more than {self.bound} allow: {what}."
                                  " `python -m forge.shards check` lists the faults of shards.")

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_shared": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state | {"_shared": _shared(2)})


def _shared(count: int) -> np.ndarray:
    """[count] int64 zeros that forked processes share. Two that add at the same moment may lose one of the two."""
    return np.frombuffer(mmap.mmap(-1, 8 * count), np.int64)
