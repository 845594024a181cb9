"""Copies on the side stream: nothing is read before it has arrived, nothing overwritten before it was read."""

from __future__ import annotations

import itertools

import pytest
import torch

from forge.batch import Batch, Cursor, Work
from forge.overlap import lane
from forge.overlap.none import WhenAsked
from forge.overlap.prefetch import Prefetch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

NUMBERS = 1 << 20           # 8 MiB a batch: its copy takes about 200 microseconds
CYCLES = 20_000_000         # about 10 milliseconds in which the model's stream has not yet read its batch


@pytest.fixture(autouse=True)
def initialised():
    torch.cuda.init()
    lane.side_stream.cache_clear()


def works(num=6, per_work=2):
    for index in range(num):
        yield Work(1, [Batch({"tokens": torch.full((NUMBERS,), per_work * index + place)}, 1, 0)
                       for place in range(per_work)], Cursor(0, index))


def stage(batch):
    """To the device; then the stream dawdles, as an augmentation might."""
    staged = batch.to(torch.device("cuda"))
    torch.cuda._sleep(CYCLES // 10)
    return staged


def sums(option):
    """What a slow model reads in its batches, which it drops as soon as it has asked for the next."""
    read = []
    for work in option(works(), stage, lambda phase: None):
        for batch in work.batches:
            torch.cuda._sleep(CYCLES)
            read.append(batch.tensors["tokens"].sum())
            del batch
    return [int(total) // NUMBERS for total in read]


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_every_batch_is_read_whole(depth):
    assert sums(Prefetch(depth)) == sums(WhenAsked()) == list(range(12))


def test_this_test_would_see_memory_given_out_too_early(monkeypatch):
    """Without the wait for the model's stream, a later copy lands in a batch that is still to be read."""
    original = torch.cuda.Stream.wait_event
    side = lane.side_stream(torch.cuda.current_device())
    monkeypatch.setattr(torch.cuda.Stream, "wait_event",
                        lambda self, event: None if self == side else original(self, event))
    assert sums(Prefetch(1)) != list(range(12))


def test_this_test_would_see_a_batch_read_before_it_arrived(monkeypatch):
    original = torch.cuda.Stream.wait_event
    side = lane.side_stream(torch.cuda.current_device())
    monkeypatch.setattr(torch.cuda.Stream, "wait_event",
                        lambda self, event: original(self, event) if self == side else None)

    def late(batch):
        torch.cuda._sleep(20 * CYCLES)
        return stage(batch)

    read = []
    for work in Prefetch(1)(works(2), late, lambda phase: None):
        read += [batch.tensors["tokens"].sum() for batch in work.batches]
    assert [int(total) // NUMBERS for total in read] != list(range(4))


def test_one_side_stream_for_the_life_of_the_process():
    device = torch.cuda.current_device()
    assert lane.side_stream(device) is lane.side_stream(device)
    assert lane.side_stream(device) != torch.cuda.default_stream(device)
    memory = []
    for _ in range(4):
        list(itertools.chain.from_iterable(work.batches for work in Prefetch(1)(works(3), stage, lambda phase: None)))
        torch.cuda.synchronize()
        memory.append(torch.cuda.memory_reserved())
    assert memory[-1] == memory[1]
