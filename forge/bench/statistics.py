"""What turns prove: the warm-up that does not count, and the interval that a ratio lies in.

Steps that follow each other are alike, so an interval over steps is far too narrow. Here a block of mirrored turns
(A B B A) is one observation: a slow drift cancels within it, and blocks are nearly independent.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from forge.observe.student import t_interval

SHIFT_NOISES = 4.0      # a change of level is one only if it is this many standard errors large
LEAST_SHIFT = 0.02      # and this much of a step
LEAST_STEADY = 5        # steps that a level must last to be one


@dataclass(frozen=True)
class Estimate:
    """A mean log-ratio and its 95 % interval: log(1 + gain). low and high are None with a single observation."""

    mean: float
    low: float | None
    high: float | None
    num: int

    @classmethod
    def of(cls, log_ratios: Sequence[float]) -> Estimate:
        """The t interval over independent observations, one at least."""
        mean, half = t_interval(log_ratios)
        if half == math.inf:
            return cls(mean, None, None, len(log_ratios))
        return cls(mean, mean - half, mean + half, len(log_ratios))

    @property
    def half_width(self) -> float | None:
        return None if self.high is None else self.high - self.mean

    @property
    def reach(self) -> float | None:
        """The end of the interval that is farthest from "no difference"."""
        return None if self.low is None or self.high is None else max(abs(self.low), abs(self.high))

    def verdict(self, floor: float) -> str:
        """faster or slower where the whole interval says so, and the mean is above the floor; else not proven."""
        if self.low is None or self.high is None or abs(self.mean) <= floor:
            return "not proven"
        return "faster" if self.low > 0 else "slower" if self.high < 0 else "not proven"


def gain(log_ratio: float) -> float:
    """0.1 for a tenth faster."""
    return math.expm1(log_ratio)


def smallest_provable(floor: float | None, estimates: Sequence[Estimate]) -> float | None:
    """The smallest log-ratio that a comparison like these could have proven: the half width of their typical interval,
    and no less than the floor that two equal sides reached."""
    halves = [estimate.half_width for estimate in estimates if estimate.half_width is not None]
    known = ([median(halves)] if halves else []) + ([floor] if floor is not None else [])
    return max(known, default=None)


def steady_from(lengths: Sequence[float], least: int) -> int:
    """How many of the first steps are warm-up: at least `least`, and up to the last change of level.

    lengths: of steps, in ms. The split that best explains the series as two levels is looked for, again in what
    follows it, for as long as it is a faster level than the one before.
    """
    start = min(least, max(0, len(lengths) - 1))
    while (split := _best_split([math.log(max(value, 1e-9)) for value in lengths[start:]])) is not None:
        start += split
    return start


def _best_split(levels: list[float]) -> int | None:
    """Where the levels fall for good, or None. By medians: one slow step is no level."""
    splits = range(1, len(levels) - LEAST_STEADY + 1)
    where = min(splits, key=lambda split: _deviation(levels[:split]) + _deviation(levels[split:]), default=None)
    if where is None:
        return None
    before, after = levels[:where], levels[where:]
    fall = median(before) - median(after)
    noise = 1.4826 * median(abs(value - median(after)) for value in after)      # of a normal distribution
    error = max(noise, 1e-6) * math.sqrt(1 / len(before) + 1 / len(after))
    return where if fall > LEAST_SHIFT and fall > SHIFT_NOISES * error else None


def _deviation(values: list[float]) -> float:
    middle = median(values)
    return sum(abs(value - middle) for value in values)
