"""Orders that are drawn from a position alone."""

from __future__ import annotations

import hashlib

import numpy as np


def shuffled(count: int, seed: int, epoch: int, what: str) -> np.ndarray:
    """A permutation of range(count). Sorting the raw words of Philox, and not Generator.permutation, whose results
    numpy may change from one version to the next: a run must resume under another."""
    key = int.from_bytes(hashlib.blake2b(f"{seed}:{epoch}:{what}".encode(), digest_size=16).digest(), "big")
    words: np.ndarray = np.random.Philox(key=key).random_raw(count)
    return np.argsort(words, kind="stable")
