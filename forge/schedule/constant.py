"""The rate stays, after a linear warm-up."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Constant:
    """warmup: updates in which the factor rises linearly to 1."""

    warmup: int

    def __call__(self, step: int, steps: int) -> float:
        return min(1.0, (step + 1) / (self.warmup + 1))
