"""hardware.garbage: what the collector walks, and that what becomes garbage later is still found."""

import gc
import weakref

import pytest
import torch
from conftest import train_here

from forge.hardware.machine import Machine
from forge.optimizer.update import GradientUpdate


class Node:
    """Part of a cycle: nothing but the collector frees it."""

    def __init__(self):
        self.itself = self


def walked(thing) -> bool:
    return any(found is thing for found in gc.get_objects())


@pytest.fixture
def step():
    weight = torch.ones(1, requires_grad=True)
    weight.grad = torch.ones(1)
    return torch.optim.SGD([weight], lr=0.1).step


@pytest.fixture(autouse=True)
def no_collection_but_ours():
    gc.disable()
    yield
    gc.enable()


def test_what_lives_is_walked_no_more_after_the_second_update_until_the_end(step):
    kept = Node()
    with Machine("cpu", 1, None, False, 1, "frozen", None).claim():
        step()
        assert walked(kept)
        step()
        assert not walked(kept) and gc.get_freeze_count() > 10_000
    assert walked(kept) and gc.get_freeze_count() == 0


def test_garbage_from_before_and_after_is_collected(step):
    with Machine("cpu", 1, None, False, 1, "frozen", None).claim():
        before = weakref.ref(Node())
        assert before() is not None
        step()
        step()
        assert before() is None
        after, alive = weakref.ref(Node()), Node()
        frozen = gc.get_freeze_count()
        step()
        gc.collect()
        assert after() is None and walked(alive)
        # Fewer where another test's thread ends meanwhile
        assert gc.get_freeze_count() <= frozen, "frozen once, so that later garbage is never kept"


def test_an_error_leaves_nothing_behind(step):
    with pytest.raises(ZeroDivisionError), Machine("cpu", 1, None, False, 1, "frozen", None).claim():
        step()
        raise ZeroDivisionError
    step()
    step()
    assert gc.get_freeze_count() == 0


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("garbage", ["automatic", "frozen"])
def test_in_a_run(garbage, optimizer, shards, tmp_path, monkeypatch):
    counts, update = [], GradientUpdate.__call__

    def counted(self):
        outcome = update(self)
        counts.append(gc.get_freeze_count())
        return outcome

    monkeypatch.setattr(GradientUpdate, "__call__", counted)
    run = train_here(tmp_path / "run", *shards, "steps=4", f"optimizer={optimizer}", f"hardware.garbage={garbage}")
    assert run.code == 0, run.err
    assert [count > 10_000 for count in counts] == [False] + [garbage == "frozen"] * 3
    assert gc.get_freeze_count() == 0
