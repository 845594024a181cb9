"""Warm-up, stable, decay (Hu et al. 2024, MiniCPM; the 1 - sqrt decay of Hägele et al. 2024)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from forge.schedule.limits import problems_of

if TYPE_CHECKING:
    from forge.config import Config


@dataclass(frozen=True)
class WarmupStableDecay:
    """warmup: updates in which the factor rises linearly to 1. decay: the last share of the run, in which it falls
    as 1 - sqrt. floor: the factor at the end."""

    warmup: int
    decay: float
    floor: float

    def problems(self, config: Config) -> Iterator[str]:
        yield from problems_of(self.warmup, self.floor)
        if not 0 < self.decay <= 1:
            yield f"schedule.decay={self.decay}: a share of the run, above 0 and up to 1, is wanted."

    def __call__(self, step: int, steps: int) -> float:
        if step < self.warmup:
            return (step + 1) / (self.warmup + 1)
        length = max(1.0, self.decay * steps)
        done = (step - (steps - length)) / length
        return self.floor + (1 - self.floor) * (1 - math.sqrt(min(1.0, max(0.0, done))))
