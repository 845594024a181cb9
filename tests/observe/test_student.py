"""Student's t against its tables."""

import math

import pytest

from forge.observe.student import t_interval, t_quantile


@pytest.mark.parametrize(("freedom", "probability", "known"), [     # any table of Student's t
    (1, 0.975, 12.7062), (2, 0.975, 4.30265), (3, 0.975, 3.18245), (5, 0.975, 2.57058), (9, 0.975, 2.26216),
    (30, 0.975, 2.04227), (200, 0.975, 1.97190), (4, 0.95, 2.13185), (10, 0.995, 3.16927), (7, 0.5, 0.0)])
def test_quantiles_are_those_of_the_tables(freedom, probability, known):
    assert t_quantile(probability, freedom) == pytest.approx(known, abs=1e-5)


def test_an_interval_is_students():
    mean, half = t_interval([1.0, 2.0, 3.0])
    assert mean == 2.0 and half == pytest.approx(4.30265 / math.sqrt(3), abs=1e-5)


def test_one_value_or_one_that_is_none_proves_nothing():
    assert t_interval([1.0]) == (1.0, math.inf)
    for value in (math.inf, -math.inf, math.nan):
        mean, half = t_interval([1.0, value, -math.inf])
        assert math.isnan(mean) and half == math.inf
