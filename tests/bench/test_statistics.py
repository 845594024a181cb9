"""The numbers behind a verdict, against known values and against simulated machines."""

import math
import random

import pytest

from forge.bench.statistics import Estimate, smallest_provable, steady_from
from forge.bench.turns import mirrored


def test_an_interval_is_the_t_interval():
    estimate = Estimate.of([0.1, 0.2, 0.3, 0.4])
    half = 3.18245 * math.sqrt(0.05 / 3) / 2            # t * s / sqrt(n)
    assert estimate.mean == pytest.approx(0.25) and estimate.half_width == pytest.approx(half, abs=1e-5)
    assert estimate.low == pytest.approx(0.25 - half, abs=1e-5) and estimate.reach == estimate.high


@pytest.mark.parametrize(("ratios", "floor", "verdict"), [
    ([0.10, 0.11, 0.09, 0.10], 0.01, "faster"), ([-0.10, -0.11, -0.09, -0.10], 0.01, "slower"),
    ([0.10, -0.11, 0.09, -0.08], 0.01, "not proven"), ([0.010, 0.011, 0.009, 0.010], 0.02, "not proven"),
    ([0.5], 0.0, "not proven")])
def test_a_verdict_needs_the_whole_interval_and_more_than_the_floor(ratios, floor, verdict):
    assert Estimate.of(ratios).verdict(floor) == verdict


def test_the_smallest_provable_gain_is_the_wider_of_floor_and_typical_interval():
    narrow, wide = Estimate.of([0.1, 0.101, 0.099, 0.1]), Estimate.of([0.1, 0.2, 0.0, 0.1])
    assert smallest_provable(0.05, [narrow, narrow, wide]) == 0.05
    assert smallest_provable(0.0, [wide]) == wide.half_width
    assert smallest_provable(None, []) is None


def noisy(level, num, noise, draws):
    return [level * math.exp(draws.gauss(0, noise)) for _ in range(num)]


@pytest.mark.parametrize(("slow", "num_slow", "expected"), [(4.0, 3, 3), (1.3, 10, 10), (1.0, 0, 1)])
def test_the_warm_up_ends_where_the_level_changes(slow, num_slow, expected):
    for trial in range(20):
        draws = random.Random(trial)
        lengths = noisy(20 * slow, num_slow, 0.01, draws) + noisy(20, 40, 0.01, draws)
        assert abs(steady_from(lengths, 1) - expected) <= 1


def test_two_levels_of_warm_up_are_both_dropped():
    draws = random.Random(0)
    lengths = noisy(400, 2, 0.01, draws) + noisy(30, 8, 0.01, draws) + noisy(20, 40, 0.01, draws)
    assert steady_from(lengths, 1) == 10


def test_one_slow_step_later_on_is_no_warm_up():
    lengths = noisy(20, 40, 0.01, random.Random(1))
    lengths[25] *= 3
    assert steady_from(lengths, 2) == 2


class Machine:
    """Step lengths of a machine that slows by 2 % while 200 steps pass, with noise that lasts for several steps."""

    def __init__(self, seed):
        self.draws, self.now, self.noise = random.Random(seed), 0, 0.0

    def turn(self, steps, factor=1.0):
        lengths = []
        for _ in range(steps):
            self.noise = 0.8 * self.noise + self.draws.gauss(0, 0.008 * math.sqrt(1 - 0.8**2))
            lengths.append(20 * factor * math.exp(self.noise) * (1 + 0.02 * self.now / 200))
            self.now += 1
        return lengths


def log_ratio(a, b):
    return math.log(sum(a) / len(a)) - math.log(sum(b) / len(b))


def interleaved(seed, factor=1.0, blocks=8, steps=6):
    """The estimate of turns as the commands take them."""
    machine, ratios = Machine(seed), []
    for _ in range(blocks):
        turns = {"a": [], "b": []}
        for name in mirrored(["a", "b"]):
            turns[name] += machine.turn(steps, factor if name == "b" else 1.0)
        ratios.append(log_ratio(turns["a"], turns["b"]))
    return Estimate.of(ratios)


def sequential(seed):
    """A first, then B, and an interval over steps: what is usually done."""
    machine = Machine(seed)
    a, b = machine.turn(100), machine.turn(100)
    return Estimate.of([math.log(x / y) for x, y in zip(a, b, strict=True)])


def test_drift_fools_a_sequential_comparison_and_not_an_interleaved_one():
    fooled = sum(sequential(seed).verdict(0.0) != "not proven" for seed in range(200)) / 200
    found = sum(interleaved(seed).verdict(0.0) != "not proven" for seed in range(200)) / 200
    assert fooled > 0.85, "nothing was changed"
    assert found < 0.10, "5 % are what a 95 % interval allows"


def test_an_interleaved_comparison_finds_a_change_of_two_per_cent():
    verdicts = [interleaved(seed, factor=0.98).verdict(0.003) for seed in range(50)]
    assert verdicts.count("faster") > 45
    covered = [estimate.low <= -math.log(0.98) <= estimate.high for estimate in map(
        lambda seed: interleaved(seed, factor=0.98), range(100))]
    assert sum(covered) >= 88
