"""In which order a batching reads the samples of a source."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from forge.batching.order import shuffled

if TYPE_CHECKING:
    from forge.data import Source


def read_order(source: Source, seed: int, epoch: int) -> tuple[np.ndarray, np.ndarray]:
    """(samples, blocks), [samples of the epoch] int64: what a source says in `order` (see forge.data.reading), and for
    one that says nothing, all samples shuffled, in one block."""
    if (order := getattr(source, "order", None)) is not None:
        samples, blocks = order(seed, epoch)
        return samples, blocks
    return shuffled(len(source), seed, epoch, "documents"), np.zeros(len(source), np.int64)


def shuffled_within(blocks: np.ndarray, seed: int, epoch: int, what: str) -> np.ndarray:
    """A permutation of range(len(blocks)) that keeps each block, [n] and never falling, where it is."""
    order = shuffled(len(blocks), seed, epoch, what)
    return order[np.argsort(blocks[order], kind="stable")]
