"""Half a cosine from 1 down to a floor (Loshchilov & Hutter 2017, without restarts)."""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Cosine:
    """warmup: updates in which the factor rises linearly to 1. floor: the factor at the end."""

    warmup: int
    floor: float

    def __call__(self, step: int, steps: int) -> float:
        if step < self.warmup:
            return (step + 1) / (self.warmup + 1)
        done = min(1.0, (step - self.warmup) / max(1, steps - 1 - self.warmup))
        return self.floor + (1 - self.floor) * 0.5 * (1 + math.cos(math.pi * done))
