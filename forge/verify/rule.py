"""How far from the truth is too far: a baseline's own error, some times over.

The rule is that of torch._dynamo.utils.same and of FlashAttention's tests: E(candidate) <= m * E(baseline) + floor,
where E is the distance to float64, relative to its size. So the tolerance follows from the number format through the
baseline's own error. The floor is for a baseline that is exact by accident. It is derived: one rounding of the format
in which products are computed (eps / 2), and the walk of a float32 sum over n targets, whose roundings add up like
random steps (sqrt(n) * eps32 / 2).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

EPS = {"float64": 2.0**-52, "float32": 2.0**-23, "tf32": 2.0**-10, "float16": 2.0**-10, "bfloat16": 2.0**-7}


@dataclass(frozen=True)
class Few:
    """Tensors of at most so many elements, and the multiplier that is allowed for them."""

    elements: int
    multiplier: float


@dataclass(frozen=True)
class Rule:
    multiplier: float
    few: list[Few]
    floor: float

    @classmethod
    def of(cls, compute: str, targets: float, multipliers: tuple[float, float], few: list[Few]) -> Rule:
        """compute: the dtype of products. multipliers: for float32 and for shorter formats."""
        half = EPS[compute] > EPS["float32"]
        floor = EPS[compute] / 2 + math.sqrt(targets) * EPS["float32"] / 2
        return cls(multipliers[half], few, floor)

    def allowed(self, baseline_error: float, elements: int) -> float:
        fitting = [one.multiplier for one in self.few if elements <= one.elements]
        return max([self.multiplier, *fitting]) * baseline_error + self.floor


@dataclass(frozen=True)
class Distance:
    """Of one tensor, or of the loss or the norm of all gradients (elements = 1).

    update: from 1. baseline, candidate: their distances to the reference, relative to its size. apart: between the two.
    allowed: the candidate's largest. bits: both are equal bit for bit.
    """

    name: str
    update: int
    elements: int
    baseline: float
    candidate: float
    apart: float
    allowed: float
    bits: bool

    @property
    def fine(self) -> bool:
        return self.bits or self.candidate <= self.allowed      # not a number is never fine

    @property
    def excess(self) -> float:
        """The candidate's error as a multiple of what is allowed."""
        return self.candidate / self.allowed if math.isfinite(self.candidate) else math.inf

    @property
    def ratio(self) -> float | None:
        """E(candidate) / E(baseline); None where the baseline is exact."""
        return self.candidate / self.baseline if self.baseline > 0 else None


@dataclass(frozen=True)
class Compared:
    """One pass. tensors: in forward order, update by update; loss and norm: of each update.

    overall: all gradients of an update as one vector. noise: between two runs of the baseline; None: not taken.
    """

    name: str
    compute: tuple[str, str]
    losses: list[Distance]
    norms: list[Distance]
    overall: list[Distance]
    tensors: list[Distance]
    values: list[dict[str, Any]]
    noise: float | None = None

    @property
    def every(self) -> list[Distance]:
        return [*self.losses, *self.norms, *self.overall, *self.tensors]

    @property
    def bits(self) -> bool:
        return all(one.bits for one in self.every)

    @property
    def fine(self) -> bool:
        return all(one.fine for one in self.every)

    @property
    def first(self) -> Distance | None:
        """The first tensor that is too far off; else the first of the sums that is."""
        wrong = [one for one in [*self.tensors, *self.losses, *self.norms, *self.overall] if not one.fine]
        return wrong[0] if wrong else None

    @property
    def worst(self) -> Distance:
        return max(self.tensors, key=lambda one: one.excess)

    @property
    def effect(self) -> float:
        """The largest change of the gradients between the two sides."""
        return largest(one.apart for one in self.overall)

    @property
    def baseline_error(self) -> float:
        return largest(one.baseline for one in self.overall)

    @property
    def candidate_error(self) -> float:
        return largest(one.candidate for one in self.overall)

    @property
    def ratio(self) -> float | None:
        """E(candidate) / E(baseline) of all gradients; None where the baseline is exact."""
        return self.candidate_error / self.baseline_error if self.baseline_error > 0 else None


def largest(numbers: Iterable[float]) -> float:
    """The largest, and not a number where one is none."""
    found = list(numbers)
    return math.nan if any(math.isnan(number) for number in found) else max(found, default=0.0)
