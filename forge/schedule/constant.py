"""The rate stays, after a linear warm-up."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from forge.config import Config


@dataclass(frozen=True)
class Constant:
    """warmup: updates in which the factor rises linearly to 1."""

    warmup: int

    def problems(self, config: Config) -> Iterator[str]:
        if self.warmup < 0:
            yield f"schedule.warmup={self.warmup}: 0 or more updates are wanted."

    def __call__(self, step: int, steps: int) -> float:
        return min(1.0, (step + 1) / (self.warmup + 1))
