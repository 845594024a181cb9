"""The order in which the samples of an epoch are read: a pure function of (seed, epoch)."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np

from forge.batching.order import shuffled


@dataclass(frozen=True, eq=False)
class Reading:
    """shards, streams: [samples] int32, where each sample lies. weights: of each stream; None: all samples, each once.
    shuffle_shards: shards whose samples are mixed at a time, so that so many are read at once; None: all.

    With weights, an epoch has as many samples as there are, in the proportion of the weights. Every stream goes on
    where the epoch before left it, and no sample of a stream comes again before all others of it have come.
    """

    shards: np.ndarray
    streams: np.ndarray
    weights: tuple[float, ...] | None
    shuffle_shards: int | None

    def order(self, seed: int, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """(samples, blocks), [samples of the epoch] int64. blocks: numbers that never fall, which shuffle window a
        sample belongs to; whoever shuffles on, shuffles within a block."""
        if self.weights is None:
            return self._passing(np.arange(len(self.shards)), seed, epoch, "documents")
        taken = [self._taken(stream, count, seed, epoch) for stream, count in enumerate(self.counts())]
        places = np.concatenate([(np.arange(len(samples)) + 0.5) / max(len(samples), 1) for samples, _ in taken])
        mixed = np.argsort(places, kind="stable")
        steps = np.concatenate([np.diff(blocks, prepend=blocks[:1]) for _, blocks in taken])
        return np.concatenate([samples for samples, _ in taken])[mixed], np.cumsum(steps[mixed])

    def counts(self) -> list[int]:
        """How many samples of each stream an epoch has."""
        assert self.weights is not None
        shares = np.array(self.weights) / sum(self.weights) * len(self.shards)
        counts = np.floor(shares).astype(np.int64)
        left = len(self.shards) - int(counts.sum())
        counts[np.argsort(counts - shares, kind="stable")[:left]] += 1          # to the largest remainders
        return [int(count) for count in counts]

    @property
    def fingerprint(self) -> str:
        """"" for the plain order, which any source has."""
        if self.weights is None and self.shuffle_shards is None:
            return ""
        digest = hashlib.blake2b(f"{self.weights} {self.shuffle_shards}".encode(), digest_size=8)
        digest.update(self.shards.astype("<i4").tobytes() + self.streams.astype("<i4").tobytes())
        return f"-{digest.hexdigest()}"

    def _taken(self, stream: int, count: int, seed: int, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """The next `count` samples of a stream without end."""
        members = np.flatnonzero(self.streams == stream)
        samples, blocks = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
        at, end = epoch * count, (epoch + 1) * count
        while at < end:
            turn, first = divmod(at, len(members))
            passed, of_passed = self._passing(members, seed, turn, f"documents of stream {stream}")
            some = slice(first, min(len(members), first + end - at))
            samples.append(passed[some])
            blocks.append(of_passed[some] + (blocks[-1][-1] + 1 if len(blocks[-1]) else 0))
            at += len(samples[-1])
        return np.concatenate(samples), np.concatenate(blocks)

    def _passing(self, members: np.ndarray, seed: int, epoch: int, what: str) -> tuple[np.ndarray, np.ndarray]:
        """All of `members` once, and their shuffle windows."""
        order = shuffled(len(members), seed, epoch, what)
        if self.shuffle_shards is None:
            return members[order], np.zeros(len(members), np.int64)
        there = np.unique(self.shards[members])
        window = np.empty(len(there), np.int64)
        window[shuffled(len(there), seed, epoch, f"shards of {what}")] = np.arange(len(there)) // self.shuffle_shards
        of_members = window[np.searchsorted(there, self.shards[members[order]])]
        together = np.argsort(of_members, kind="stable")
        return members[order][together], of_members[together]
