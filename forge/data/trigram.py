"""The loss of a model that only counts bytes: what a trained model has to beat to have learned more than spelling."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from forge.data import Source

_AT_A_TIME = 1 << 22        # trigrams in hand at once: bounds the memory on a large text
_ENOUGH = 256 << 20         # bytes of a text that are counted: more hardly changes a table of trigrams


def heldout_loss(train: Source, heldout: Source) -> float:
    """Nats per byte of `heldout` under byte trigrams counted on `train`, both with byte 0 after each document.

    p(c | a, b) is Witten and Bell's interpolation (IEEE Trans. Inf. Theory 37, 1991) of trigram, bigram and unigram
    counts and the uniform distribution, so it is finite for what was never seen. Before the text stand two bytes 0.
    Of more than 256 MB, every second, third ... document is read.
    """
    counts = np.zeros(1 << 24, np.int32)
    for trigrams in _trigrams(train):
        counts += np.bincount(trigrams, minlength=1 << 24).astype(np.int32)
    triples = _Counts.of(counts.reshape(1 << 16, 256))
    pairs = _Counts.of(counts.reshape(256, 256, 256).sum(0))
    singles = _Counts.of(pairs.counts.sum(0)[None])
    nats, num_bytes = 0.0, 0
    for trigrams in _trigrams(heldout):
        byte = trigrams & 255
        p = singles.mixed(np.zeros_like(byte), byte, np.full(len(byte), 1 / 256))
        p = pairs.mixed(trigrams >> 8 & 255, byte, p)
        p = triples.mixed(trigrams >> 8, byte, p)
        nats -= float(np.log(p).sum())
        num_bytes += len(p)
    return nats / num_bytes


@dataclass(frozen=True, eq=False)
class _Counts:
    """counts: [contexts, 256]. totals, kinds: [contexts], how often a context was seen, and before how many bytes."""

    counts: np.ndarray
    totals: np.ndarray
    kinds: np.ndarray

    @staticmethod
    def of(counts: np.ndarray) -> _Counts:
        return _Counts(counts, counts.sum(1), np.count_nonzero(counts, axis=1))

    def mixed(self, context: np.ndarray, byte: np.ndarray, lower: np.ndarray) -> np.ndarray:
        """p(byte | context); `lower`, what a shorter context says, weighs as often as something new came."""
        new, total = self.kinds[context], self.totals[context]
        return np.where(total > 0, (self.counts[context, byte] + new * lower) / np.maximum(total + new, 1), lower)


def _trigrams(source: Source) -> Iterator[np.ndarray]:
    """All (a, b, c) of the joined documents as a * 65536 + b * 256 + c, int64, a part at a time."""
    read = range(0, len(source), 1 + int(source.lengths.sum()) // _ENOUGH)
    held, size = [np.zeros(2, np.int64)], 2
    for index in read:
        held.append(source[index]["tokens"].numpy())
        size += len(held[-1])
        if size > _AT_A_TIME or index == read[-1]:
            text = np.concatenate(held)
            yield text[:-2] << 16 | text[1:-1] << 8 | text[2:]
            held, size = [text[-2:]], 2
