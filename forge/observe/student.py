"""Student's t: how well a mean is known from a few independent observations."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, stdev


def t_interval(values: Sequence[float]) -> tuple[float, float]:
    """(mean, half the width of its 95 % interval). The half is infinite for one value; (nan, inf) where one is not
    finite."""
    if not all(map(math.isfinite, values)):
        return math.nan, math.inf
    if len(values) < 2:
        return fmean(values), math.inf
    return fmean(values), t_quantile(0.975, len(values) - 1) * stdev(values) / math.sqrt(len(values))


def t_quantile(probability: float, freedom: int) -> float:
    """Student's t: the value that is exceeded with 1 - probability. probability: from 0.5 to below 1."""
    low, high = 0.0, 1.0
    while _t_below(high, freedom) < probability:
        low, high = high, 2 * high
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if _t_below(middle, freedom) < probability else (low, middle)
    return (low + high) / 2


def _t_below(t: float, freedom: int) -> float:
    """P(T <= t) for t >= 0."""
    return 1 - _incomplete_beta(freedom / (freedom + t * t), freedom / 2, 0.5) / 2


def _incomplete_beta(x: float, a: float, b: float) -> float:
    """The regularised incomplete beta function, by its continued fraction (Press et al., Numerical Recipes, 6.4)."""
    if x <= 0 or x >= 1:
        return min(max(x, 0.0), 1.0)
    front = math.exp(math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x))
    if x > (a + 1) / (a + b + 2):
        return 1 - front * _fraction(1 - x, b, a) / b
    return front * _fraction(x, a, b) / a


def _fraction(x: float, a: float, b: float) -> float:
    """Lentz's method."""
    tiny, c = 1e-300, 1.0
    d = 1 / (1 - (a + b) * x / (a + 1))
    value = d
    for m in range(1, 300):
        for term in (m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m)),
                     -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))):
            d, c = 1 / (1 + term * d or tiny), 1 + term / c or tiny
            value *= c * d
        if abs(c * d - 1) < 1e-15:
            break
    return value
