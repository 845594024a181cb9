"""splitmix64 (Steele et al. 2014), after which neighbours lie far apart; and who is held out by such a hash."""

from __future__ import annotations

import numpy as np

STEP = 0x9E3779B97F4A7C15           # from one number to the next
ROUNDS = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))       # (shift, factor) of each
LAST_SHIFT = 31


def stirred(numbers: np.ndarray, num_rounds: int = len(ROUNDS)) -> np.ndarray:
    """The first rounds of it. numbers: uint64."""
    for shift, factor in ROUNDS[:num_rounds]:
        numbers = (numbers ^ numbers >> np.uint64(shift)) * np.uint64(factor)
    return numbers


def held_out(hashes: np.ndarray, fraction: float) -> np.ndarray:
    """[samples] bool: that share of all hashes, the lowest, and no less than one on either side. hashes: [samples]
    uint64, two or more."""
    held = hashes < np.uint64(int(fraction * 2**64))
    if held.all() or not held.any():
        held[:] = held[0]
        held[np.argmin(hashes)] = not held[0]
    return held
