"""What is concluded from the ends of trainings, without any training."""

import math
from types import SimpleNamespace

import pytest

from forge.verify.changes import Change
from forge.verify.converge import Converge
from forge.verify.curves import facts, judge

CONVERGE = Converge(steps=10, seeds=3, twin=True, tolerance=0.01, batches=1, smooth=1, declared={"x": "maths"})
LOSSES = [3.0, 3.1, 2.9]


def judged(baseline, candidate, losses=LOSSES, change="attention"):
    """baseline, candidate: accuracies of each seed. losses: the candidate's held-out ones."""
    ends = {"baseline": (LOSSES, baseline), "candidate": (losses, candidate), "twin": (LOSSES, baseline)}
    trained = {name: [{"losses": [5.0, loss], "heldout_loss": loss, "accuracy": right}
                      for loss, right in zip(*end, strict=True)] for name, end in ends.items()}
    trained["candidate"][0]["losses"] = [5.1, 3.0]
    pair = SimpleNamespace(changes=[Change(change, 1, 2)], declared=[])
    return judge(CONVERGE, pair, facts(trained, CONVERGE.smooth))


def test_zero_and_zero_are_equal():
    found = judged([0.0, 0.0, 0.0], [0.0, 0.0, 0.0])
    assert found.verdict == "same final metric" and "+0.000% +- 0.000%" in found.reason


def test_nothing_is_relative_to_a_baseline_of_zero():
    found = judged([0.1, 0.0, 0.1], [0.1, 0.1, 0.1])
    assert found.verdict == "cannot judge" and found.exit_code == 4
    assert "The baseline's next-token accuracy is 0 for seed 2" in found.reason and "verify.steps" in found.reason
    assert "inf" not in found.reason and "nan" not in found.reason


def test_another_metric_may_still_differ_for_certain():
    found = judged([0.0, 0.0, 0.0], [0.1, 0.1, 0.1], losses=[2 * loss for loss in LOSSES])
    assert found.verdict == "differs"
    assert judged([0.0] * 3, [0.1] * 3, [2 * loss for loss in LOSSES], "x").verdict == "differs by design: x = 1 -> 2"


def test_a_candidate_that_ends_in_no_number_differs_and_such_a_baseline_proves_nothing():
    assert judged([0.1] * 3, [0.1] * 3, losses=[3.0, math.nan, 2.9]).verdict == "differs"
    found = judged([0.1, math.nan, 0.1], [0.1] * 3)
    assert found.verdict == "cannot judge" and "is nan for seed 2: there is nothing to compare with" in found.reason


@pytest.mark.parametrize(("candidate", "verdict"), [
    ([0.1, 0.2, 0.3], "same final metric"), ([0.2, 0.4, 0.6], "differs"), ([0.05, 0.2, 0.4], "cannot judge")])
def test_the_whole_interval_decides(candidate, verdict):
    assert judged([0.1, 0.2, 0.3], candidate).verdict == verdict
