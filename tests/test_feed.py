"""The work of a position: the same data for any number of readers, cut into micro-batches, with its own seed."""

import threading

import numpy as np
import pytest
import torch

from forge.batch import Cursor
from forge.batching.fixed import Fixed
from forge.feed import Feed


class Documents:
    fingerprint = ""
    lengths = np.arange(1, 41)      # 820 tokens

    def __len__(self):
        return 40

    def __getitem__(self, index):
        return {"tokens": torch.full((index + 1,), index) * 100 + torch.arange(index + 1)}


def feed(**changes):
    settings = {"source": Documents(), "batching": Fixed(8, False), "seed": 0, "global_batch": 12, "micro_batch": 2,
                "data_rank": 0, "data_size": 1}
    return Feed(**settings | changes)


def rows(works):
    return sorted(row for work in works for batch in work.batches for row in batch.tensors["tokens"].tolist())


@pytest.mark.parametrize("size", [1, 2, 3, 6])
def test_any_number_of_readers_share_the_same_rows(size):
    for cursor in (Cursor(), Cursor(0, 7), Cursor(5, 3)):
        alone = feed()[cursor]
        shares = [feed(data_rank=rank, data_size=size)[cursor] for rank in range(size)]
        assert rows(shares) == rows([alone]) and len(rows(shares)) == 12
        assert sum(share.num_targets for share in shares) == alone.num_targets == 12 * 8
        assert {share.cursor for share in shares} == {alone.cursor}


def test_a_work_is_cut_into_micro_batches():
    work = feed(micro_batch=5)[Cursor()]
    assert [len(batch.tensors["tokens"]) for batch in work.batches] == [5, 5, 2]
    assert [batch.num_targets for batch in work.batches] == [40, 40, 16]
    assert rows([work]) == rows([feed(micro_batch=12)[Cursor()]])


def test_targets_that_are_not_predicted_do_not_count():
    work = feed(batching=Fixed(8, True))[Cursor()]
    assert work.num_targets == sum(int((batch.tensors["targets"] >= 0).sum()) for batch in work.batches) < 12 * 8


def test_positions_go_on_into_the_next_epoch():
    each = feed()
    assert len(each.plan(0)) == 8
    assert each[Cursor(0, 3)].cursor == each.after(Cursor(0, 3)) == Cursor(0, 4)
    assert each[Cursor(0, 7)].cursor == each.after(Cursor(0, 7)) == Cursor(1, 0)
    assert each.before(Cursor(0, 4)) == Cursor(0, 3) and each.before(Cursor(1, 0)) == Cursor(0, 7)
    assert rows([each[Cursor(0, 0)]]) != rows([each[Cursor(1, 0)]])


def test_seeds_follow_the_position_and_the_rank():
    def seeds(**changes):
        each = feed(**changes)
        return [batch.seed for cursor in (Cursor(0, 0), Cursor(0, 1), Cursor(1, 0)) for batch in each[cursor].batches]

    everywhere = seeds(data_size=2) + seeds(data_size=2, data_rank=1) + seeds(seed=1, data_size=2)
    assert len(set(everywhere)) == len(everywhere) == 27
    assert seeds() == seeds() and all(0 <= seed < 2 ** 63 for seed in everywhere)


def test_an_epoch_is_planned_once(monkeypatch):
    planned = []
    plan = Fixed.plan
    monkeypatch.setattr(Fixed, "plan", lambda *arguments: planned.append(arguments[3]) or plan(*arguments))
    each = feed()
    for cursor in (Cursor(0, 0), Cursor(0, 1), Cursor(0, 7), Cursor(1, 0)):
        each[cursor]
    assert planned == [0, 1]


class Long(Documents):
    lengths = np.full(40, 201)      # 1,005 windows of 8, 83 updates


def planned_in(monkeypatch):
    """Where each epoch was planned: (epoch, name of the thread)."""
    calls, plan = [], Fixed.plan
    monkeypatch.setattr(Fixed, "plan", lambda *arguments: calls.append((arguments[3], threading.current_thread().name))
                        or plan(*arguments))
    return calls


def test_the_next_epoch_is_planned_in_a_thread_before_this_one_ends(monkeypatch):
    expected = feed(source=Long()).plan(1)
    calls = planned_in(monkeypatch)
    each = feed(source=Long())
    assert len(each.plan(0)) == 83
    each.coming(Cursor(0, 18))
    each.close()
    assert calls == [(0, "MainThread")]
    each.coming(Cursor(0, 19))
    each[Cursor(0, 82)]             # what is read out of turn plans nothing
    each.close()
    assert calls == [(0, "MainThread"), (1, "planner")]
    each.coming(Cursor(1, 0))
    assert [list(batch) for batch in each.plan(1)] == [list(batch) for batch in expected]
    assert calls == [(0, "MainThread"), (1, "planner")]
