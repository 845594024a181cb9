"""Where a step's time goes: the phases of a real run against clocks of the test's own, and time that was planted."""

import time

import pytest
from conftest import train_here
from planted import plant, train_planted

from forge.observe.phases import WARMUP
from forge.trainer import Trainer

SLOW = 0.1          # seconds: several times what anything else takes in these steps, also on a busy machine
LIVE = ("data_wait", "copy", "forward", "backward", "optimizer", "other")


@pytest.fixture
def clock(monkeypatch):
    """When each step of a run began, and when its last one ended, by the test's own clock."""
    moments, steps = [], Trainer.steps

    def timed(self, last):
        moments.append(time.perf_counter())
        for step in steps(self, last):
            yield step
            moments.append(time.perf_counter())     # observers have looked: the next step begins

    monkeypatch.setattr(Trainer, "steps", timed)
    return moments


def total(result) -> float:
    return sum(ms for ms in result["phases_ms"].values() if ms is not None)


def measured(clock) -> float:
    """Milliseconds a step, of those after the warm-up."""
    return (clock[-1] - clock[WARMUP]) / (len(clock) - 1 - WARMUP) * 1e3


def test_the_phases_sum_to_the_step(clock, shards, tmp_path):
    result = train_here(tmp_path / "run", *shards, "steps=12").result
    assert result["phases_ms"].keys() >= set(LIVE)
    assert all(result["phases_ms"][phase] > 0 for phase in LIVE)
    assert total(result) == pytest.approx(measured(clock), rel=0.02)
    assert total(result) == pytest.approx(result["step_ms"]["mean"], rel=1e-9)


def test_what_only_a_trace_can_tell_is_null_without_one(shards, tmp_path):
    result = train_here(tmp_path / "run", *shards, "steps=4").result
    assert result["phases_ms"]["exposed_comm"] is None and result["phases_ms"]["idle"] is None


def test_pauses_are_no_part_of_a_step(clock, shards, tmp_path, monkeypatch):
    """Snapshots and evaluation each wait here, and neither the steps nor the tokens/s hear of it."""
    from forge.observe.evaluate import Judge
    from forge.snapshot import store

    write, judge = store.write_snapshot, Judge.mean_loss
    monkeypatch.setattr(store, "write_snapshot", lambda *a, **k: (time.sleep(SLOW), write(*a, **k))[1])
    monkeypatch.setattr(Judge, "mean_loss", lambda *a, **k: (time.sleep(SLOW), judge(*a, **k))[1])
    result = train_here(tmp_path / "run", *shards, "steps=12", "snapshot=inline", "snapshot.every=2",
                        "evaluation=heldout", "evaluation.every=2", "evaluation.sample=0",
                        "evaluation.baseline=false").result
    assert result["pause_seconds"] >= 2 * 6 * SLOW
    after_warmup = 2 * 5 * SLOW / (12 - WARMUP) * 1e3           # milliseconds a step that were planted
    assert measured(clock) - total(result) >= after_warmup
    assert result["tokens_per_second"] == pytest.approx(12 * 32 / total(result) * 1e3, rel=1e-6)


READER = f"""
import time
from dataclasses import dataclass
from forge.dataloader.simple import Simple

@dataclass(frozen=True)
class Option:
    def build(self, feed, topology):
        return Slow(Simple().build(feed, topology))

class Slow:
    def __init__(self, reader):
        self.reader, self.seek, self.close = reader, reader.seek, reader.close

    def __iter__(self):
        for work in self.reader:
            time.sleep({SLOW})
            yield work
"""
UPDATER = f"""
import time
from dataclasses import dataclass
from typing import Any

@dataclass(frozen=True)
class Option:
    lr: float
    max_skipped: int
    groups: list[Any]

    def build(self, model, schedule, steps, precision):
        from forge.optimizer.adamw import AdamW
        made = AdamW(self.lr, 0.9, 0.95, 1e-8, 0.1, 1.0, "fused", self.max_skipped, []).build(
            model, schedule, steps, precision)
        return Slow(made)

class Slow:
    def __init__(self, update):
        self.update, self.scale = update, update.scale
        self.state_dict, self.load_state_dict = update.state_dict, update.load_state_dict

    def __call__(self):
        time.sleep({SLOW})
        return self.update()
"""


@pytest.mark.parametrize(("group", "code", "settings", "phase"), [
    ("dataloader", READER, {}, "data_wait"),
    ("optimizer", UPDATER, {"lr": 1e-3, "max_skipped": 5, "groups": "[]"}, "optimizer")])
def test_planted_time_is_found_where_it_was_planted(group, code, settings, phase, clock, shards, tmp_path):
    allowed = plant(tmp_path / "options", group, f"slow_{group}", code, **settings)
    result = train_planted(tmp_path / "run", tmp_path / "options", allowed, *shards, f"{group}=slow_{group}",
                           "steps=10").result
    spent = result["phases_ms"]
    assert spent[phase] >= SLOW * 1e3
    assert all(spent[other] < SLOW * 1e3 for other in LIVE if other != phase)
    assert total(result) == pytest.approx(measured(clock), rel=0.02)
