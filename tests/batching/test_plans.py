"""The next epoch is planned beside the reading of this one: the same plans, and nobody waits for them or is left."""

import os
import threading

import pytest

from forge.batching.plans import Plans


class Made:
    """Plans that are named by their epoch. held: epochs whose plans wait for `go`. bad: those that fail."""

    def __init__(self, held=(), bad=()):
        self.held, self.bad, self.go = set(held), set(bad), threading.Event()
        self.calls = []         # (epoch, name of the thread)

    def __call__(self, epoch):
        self.calls.append((epoch, threading.current_thread().name))
        if epoch in self.held and threading.current_thread() is not threading.main_thread():
            assert self.go.wait(30)
        if epoch in self.bad:
            raise ZeroDivisionError(f"epoch {epoch}")
        return f"plan {epoch}"


def test_a_plan_is_made_once_ahead_or_when_it_is_asked_for():
    make = Made()
    plans = Plans(make)
    assert plans[0] == plans[0] == "plan 0"
    plans.prepare(1)
    plans.prepare(1)
    plans.prepare(0)
    assert plans[1] == plans[1] == "plan 1"
    assert make.calls == [(0, "MainThread"), (1, "planner")]


def test_others_are_read_while_a_plan_is_made():
    make = Made(held=[1])
    plans = Plans(make)
    plans.prepare(1)
    plans.prepare(2)            # one at a time
    assert plans[0] == "plan 0" and plans[2] == "plan 2"
    make.go.set()
    assert plans[1] == "plan 1"
    assert sorted(make.calls) == [(0, "MainThread"), (1, "planner"), (2, "MainThread")]


def test_a_failure_ahead_is_told_when_the_plan_is_asked_for(monkeypatch):
    told = []
    monkeypatch.setattr("threading.excepthook", told.append)
    make = Made(bad=[1])
    plans = Plans(make)
    plans.prepare(1)
    plans.close()
    assert plans[0] == "plan 0" and not told
    for _ in range(2):
        with pytest.raises(ZeroDivisionError, match="epoch 1"):
            plans[1]
    plans.prepare(2)
    assert plans[2] == "plan 2" and (2, "planner") in make.calls


def test_closing_leaves_no_thread():
    make = Made(held=[1])
    plans = Plans(make)
    plans.close()
    plans.prepare(1)
    make.go.set()
    plans.close()
    assert "planner" not in [thread.name for thread in threading.enumerate()]
    assert plans[1] == "plan 1" and make.calls == [(1, "planner")]


def test_few_plans_are_kept():
    make = Made()
    plans = Plans(make)
    for epoch in (0, 1, 2, 1, 3, 1, 0):
        plans[epoch]
    assert [epoch for epoch, _ in make.calls] == [0, 1, 2, 3, 0]


def test_a_process_that_is_forked_meanwhile_makes_its_own():
    make = Made(held=[1])
    plans = Plans(make)
    plans.prepare(1)
    if not (child := os.fork()):
        os._exit(0 if plans[1] == "plan 1" and make.calls[-1] == (1, "MainThread") else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    make.go.set()
    assert plans[1] == "plan 1" and make.calls == [(1, "planner")]
