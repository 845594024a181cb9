"""The rate stays, after a linear warm-up."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from forge.schedule.limits import problems_of

if TYPE_CHECKING:
    from forge.config import Config


@dataclass(frozen=True)
class Constant:
    """warmup: updates in which the factor rises linearly to 1."""

    warmup: int

    def problems(self, config: Config) -> Iterator[str]:
        yield from problems_of(self.warmup)

    def __call__(self, step: int, steps: int) -> float:
        return min(1.0, (step + 1) / (self.warmup + 1))
