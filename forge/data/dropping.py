"""Bad samples: counted by reason and shard, told, and the end of a run where there are too many."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

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


class Reads(NamedTuple):
    """How many samples were tried, and which were bad: (reason, number of the shard) of each."""

    tried: int
    bad: tuple[tuple[str, int], ...]


class Dropped:
    """What was dropped of some shards.

    By `missed`, when they are opened, on what the index knows; by `failed`, when a sample is read. Reads are counted in
    this process and judged at once, unless `left_to_all`: then they travel with the batches (see `taken`) to where
    those of all workers and ranks are added up, and nothing is judged here.
    """

    def __init__(self, shards: Sequence[Location], bound: Bound) -> None:
        self.shards, self.bound = list(shards), bound
        self.counts: Counter[tuple[str, int]] = Counter()       # (reason, number of the shard)
        self.at_opening: Counter[tuple[str, int]] = Counter()
        self.left_to_all = False
        self._first: dict[tuple[str, int], int] = {}            # the byte where it was seen first
        self._tried, self._bad = 0, 0
        self._fresh = Reads(0, ())                              # since `taken`

    def missed(self, shard: int, reason: str, offset: int) -> None:
        self.counts[reason, shard] += 1
        self._first.setdefault((reason, shard), offset)

    def opened(self, num_kept: int) -> None:
        """All shards are open. Raises UnreadableError where too much of them is bad."""
        self.at_opening = self.counts.copy()
        if num_bad := self.counts.total():
            say(f"Dropped {self.sentence()}.")
            self.judge(num_bad, num_kept + num_bad, self.sentence())

    def tried(self) -> None:
        self._tried += 1
        self._fresh = Reads(self._fresh.tried + 1, self._fresh.bad)

    def failed(self, bad: BadSample) -> None:
        """Say it, and count it. Raises UnreadableError where too many were bad."""
        self.counts[bad.reason, bad.shard] += 1
        self._bad += 1
        self._fresh = Reads(self._fresh.tried, (*self._fresh.bad, (bad.reason, bad.shard)))
        say(f"Dropped a sample, another takes its place: {bad}")
        if not self.left_to_all:
            self.judge(self._bad, self._tried, f"of late: {bad}")

    def taken(self) -> Reads:
        """The reads of this process since it was asked last."""
        fresh, self._fresh = self._fresh, Reads(0, ())
        return fresh

    def judge(self, num_bad: int, num_tried: int, what: str) -> None:
        """Raises UnreadableError where more are bad than the bound allows. what: to be named in the sentence."""
        if self.bound.passed(num_bad, num_tried):
            raise UnreadableError(f"{num_bad:,} of {num_tried:,} samples are bad, more than {self.bound} allow: {what}."
                                  " `python -m forge.shards check` lists the faults of shards.")

    def named(self, counts: Mapping[tuple[str, int], int]) -> Counter[tuple[str, str]]:
        """The same by (reason, shard)."""
        return Counter({(reason, str(self.shards[shard])): count for (reason, shard), count in counts.items()})

    def sentence(self, counts: Mapping[tuple[str, int], int] | None = None) -> str:
        """By reason and shard; None: all counts of this process."""
        counts = self.counts if counts is None else counts
        reasons: Counter[str] = Counter()
        for (reason, _), count in counts.items():
            reasons[reason] += count
        return "; ".join(f"{count:,} for {reason} ({self._where(reason, counts)})" for reason, count in
                         reasons.most_common(_LISTED))

    def _where(self, reason: str, counts: Mapping[tuple[str, int], int]) -> str:
        found = Counter({shard: count for (why, shard), count in counts.items() if why == reason})
        listed = ", ".join(f"{count:,} in {self.shards[shard]}{self._byte(reason, shard, count)}"
                           for shard, count in found.most_common(_LISTED))
        return listed + (f", and in {len(found) - _LISTED:,} more shards" if len(found) > _LISTED else "")

    def _byte(self, reason: str, shard: int, count: int) -> str:
        if (offset := self._first.get((reason, shard))) is None:
            return ""
        return f", byte {offset}" if count == 1 else f", the first at byte {offset}"
