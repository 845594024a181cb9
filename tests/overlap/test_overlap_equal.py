"""Overlap decides when batches are staged, and changes neither their order nor a bit of them."""

from __future__ import annotations

import itertools
import logging
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from forge import notes
from forge.augment.none import Unchanged
from forge.batch import Batch, Cursor, Work
from forge.overlap.none import WhenAsked
from forge.overlap.prefetch import Prefetch

OPTIONS = [WhenAsked(), Prefetch(1), Prefetch(2), Prefetch(5)]


def host_works(num=None, per_work=3, log=None):
    """Work after work, each batch full of its own number; endless, as readers are, unless told."""
    for index in itertools.count() if num is None else range(num):
        if log is not None:
            log.append(("read", index))
        batches = [Batch({"tokens": torch.full((2, 4), per_work * index + place)}, 8, per_work * index + place)
                   for place in range(per_work)]
        yield Work(8 * per_work, batches, Cursor(0, index + 1))


def stage(log):
    def staged(batch):
        log.append(("stage", batch.seed))
        return replace(batch, tensors={"tokens": batch.tensors["tokens"] * 2 + 1})
    return staged


def numbers(batch):
    assert torch.equal(batch.tensors["tokens"], torch.full((2, 4), 2 * batch.seed + 1))
    return batch.seed


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("per_work", [1, 2, 3])
@pytest.mark.parametrize("num", [0, 1, 4])
def test_same_batches_in_the_same_order_under_the_same_cursor(option, per_work, num):
    works = option(host_works(num, per_work), stage([]), lambda phase: None)
    seen = [(work.cursor.index, work.num_targets, [numbers(batch) for batch in work.batches]) for work in works]
    assert seen == [(index + 1, 8 * per_work, list(range(per_work * index, per_work * (index + 1))))
                    for index in range(num)]


@pytest.mark.parametrize("option", OPTIONS)
def test_each_batch_is_staged_once_in_order_after_a_mark(option):
    log = []
    works = option(host_works(), stage(log), lambda phase: log.append(("mark", phase)))
    for work in itertools.islice(works, 4):
        for _ in work.batches:
            pass
    staged = [number for word, number in log if word == "stage"]
    assert staged == list(range(len(staged)))
    assert all(log[place - 1] == ("mark", "copy") for place, (word, _) in enumerate(log) if word == "stage")
    assert len(log) == 2 * len(staged)


@pytest.mark.parametrize("depth", [1, 2, 5])
def test_prefetch_is_depth_batches_ahead_and_no_more(depth):
    log = []
    works = Prefetch(depth)(host_works(log=log), stage(log), lambda phase: None)
    handed = 0
    for work in itertools.islice(works, 5):
        num_read = sum(word == "read" for word, _ in log)
        for batch in work.batches:
            assert batch.seed == handed
            handed += 1
            assert sum(word == "stage" for word, _ in log) == handed + depth
        assert work.cursor == Cursor(0, handed // 3)            # and not that of what was read ahead
        assert sum(word == "read" for word, _ in log) == num_read == handed // 3 + -(-depth // 3)


def test_none_stages_nothing_ahead():
    log = []
    works = WhenAsked()(host_works(log=log), stage(log), lambda phase: None)
    first = next(works)
    assert log == [("read", 0)]
    next(iter(first.batches))
    assert log == [("read", 0), ("stage", 0)]


@pytest.mark.parametrize("option", OPTIONS)
def test_the_next_work_may_be_taken_before_this_one_is_done(option):
    works = option(host_works(2), stage([]), lambda phase: None)
    first, second = next(works), next(works)
    assert [numbers(batch) for batch in second.batches] == [3, 4, 5]
    assert [numbers(batch) for batch in first.batches] == [0, 1, 2]
    assert next(works, None) is None


def test_an_error_of_the_reader_comes_through_where_its_work_was_due():
    def broken():
        yield from host_works(1)
        raise OSError("shard damaged")

    works = WhenAsked()(broken(), stage([]), lambda phase: None)
    assert [batch.seed for batch in next(works).batches] == [0, 1, 2]
    with pytest.raises(OSError, match="shard damaged"):
        next(works)
    with pytest.raises(OSError, match="shard damaged"):
        list(Prefetch(1)(broken(), stage([]), lambda phase: None))


def test_prefetch_on_a_cpu_says_that_it_gains_nothing(monkeypatch, caplog):
    monkeypatch.setattr(notes, "_said", set())
    caplog.set_level(logging.WARNING, "forge")
    for _ in range(2):
        Prefetch(1)(host_works(1), stage([]), lambda phase: None)
    assert ["gains no time" in record.message for record in caplog.records] == [True]


def test_depth_must_be_positive():
    (problem,) = Prefetch(0).problems(SimpleNamespace())
    assert problem.startswith("overlap.depth=0") and "overlap=none" in problem
    assert list(Prefetch(1).problems(SimpleNamespace())) == []


def test_no_augmentation_is_the_batch_itself():
    batch = Batch({}, 0, 0)
    assert Unchanged()(batch) is batch
