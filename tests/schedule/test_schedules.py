"""Learning rates at known updates, by arithmetic on paper."""

import math

import pytest

from forge.schedule.constant import Constant
from forge.schedule.cosine import Cosine
from forge.schedule.wsd import WarmupStableDecay

STEPS = 101
SCHEDULES = [Constant(4), Cosine(4, 0.1), WarmupStableDecay(4, 0.2, 0.0)]


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda schedule: type(schedule).__name__)
def test_the_rate_rises_linearly_and_never_is_0_at_the_start(schedule):
    assert [schedule(step, STEPS) for step in range(5)] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])


@pytest.mark.parametrize(("schedule", "known"), [
    (Constant(4), {5: 1, 100: 1, 1000: 1}),
    (Constant(0), {0: 1, 100: 1}),
    (Cosine(4, 0.1), {52: 0.55, 28: 0.1 + 0.45 * (1 + math.sqrt(0.5)), 76: 0.1 + 0.45 * (1 - math.sqrt(0.5)), 100: 0.1,
                      1000: 0.1}),
    (Cosine(0, 0.0), {0: 1, 50: 0.5, 100: 0}),
    (WarmupStableDecay(4, 0.2, 0.0), {5: 1, 80: 1, 100: 1 - math.sqrt(1 - 1 / 20.2), 1000: 0}),
    (WarmupStableDecay(4, 0.2, 0.3), {80: 1, 1000: 0.3}),
], ids=str)
def test_the_rate_at_known_updates(schedule, known):
    assert {step: schedule(step, STEPS) for step in known} == {step: pytest.approx(factor, abs=1e-12)
                                                              for step, factor in known.items()}


@pytest.mark.parametrize("schedule", SCHEDULES[1:], ids=lambda schedule: type(schedule).__name__)
def test_the_rate_never_rises_after_the_warm_up(schedule):
    factors = [schedule(step, STEPS) for step in range(4, STEPS)]
    assert factors == sorted(factors, reverse=True) and 0 <= factors[-1] < 0.3


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda schedule: type(schedule).__name__)
def test_a_run_shorter_than_its_warm_up_has_a_rate(schedule):
    assert all(0 < schedule(step, 3) <= 1 for step in range(3))


def test_a_run_of_one_update_has_a_rate():
    assert [schedule(0, 1) for schedule in (Constant(0), Cosine(0, 0.1))] == [1, 1]
