"""Half a cosine from 1 down to a floor (Loshchilov & Hutter 2017, without restarts)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from forge.schedule.limits import problems_of

if TYPE_CHECKING:
    from forge.config import Config


@dataclass(frozen=True)
class Cosine:
    """warmup: updates in which the factor rises linearly to 1. floor: the factor at the end."""

    warmup: int
    floor: float

    def problems(self, config: Config) -> Iterator[str]:
        yield from problems_of(self.warmup, self.floor)

    def __call__(self, step: int, steps: int) -> float:
        if step < self.warmup:
            return (step + 1) / (self.warmup + 1)
        done = min(1.0, (step - self.warmup) / max(1, steps - 1 - self.warmup))
        return self.floor + (1 - self.floor) * 0.5 * (1 + math.cos(math.pi * done))
