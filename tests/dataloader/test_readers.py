"""Readers differ in when and where they read, and in nothing else; what goes wrong in a worker reaches its parent."""

import itertools
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from forge.batch import Cursor
from forge.batching.fixed import Fixed
from forge.dataloader.simple import Simple
from forge.dataloader.webdataset import Workers
from forge.errors import ConfigError, UnreadableError
from forge.feed import Feed
from forge.hardware import Topology

ALONE = Topology(torch.device("cpu"), 0, 0, 1, None)


class Documents:
    """A hundred documents; reading one whose number is `bad` calls `fail`."""

    fingerprint = ""
    lengths = np.arange(1, 101)

    def __init__(self, bad=None, fail=None):
        self.bad, self.fail = bad, fail

    def __len__(self):
        return 100

    def __getitem__(self, index):
        if index == self.bad:
            self.fail()
        return {"tokens": torch.arange(index + 1) + 1000 * index}


def feed(source=None, mask=True, **changes):
    settings = {"source": source or Documents(), "batching": Fixed(16, mask), "seed": 0, "global_batch": 18,
                "micro_batch": 4, "data_rank": 0, "data_size": 1}
    return Feed(**settings | changes)


def workers(count, **changes):
    settings = {"workers": count, "core_fraction": 0.5, "prefetch_factor": 2, "persistent": True, "pin_memory": True}
    return Workers(**settings | changes)


@pytest.fixture
def read():
    """Read `count` works from a cursor; readers are closed after the test."""
    readers = []

    def first(option, each, cursor, count):
        readers.append(option.build(each, ALONE))
        readers[-1].seek(cursor)
        return list(itertools.islice(readers[-1], count))

    yield first
    for reader in readers:
        reader.close()


def assert_equal(works, others):
    assert len(works) == len(others)
    for one, other in zip(works, others, strict=True):
        assert (one.num_targets, one.cursor) == (other.num_targets, other.cursor)
        for batch, twin in zip(one.batches, other.batches, strict=True):
            assert (batch.num_targets, batch.seed) == (twin.num_targets, twin.seed)
            assert list(batch.tensors) == list(twin.tensors)
            for name, tensor in batch.tensors.items():
                assert tensor.dtype == twin.tensors[name].dtype and tensor.equal(twin.tensors[name])


def children():
    return {int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()}


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.parametrize("count", [0, 1, 2, 3])
@pytest.mark.parametrize("cursor", [Cursor(), Cursor(0, 5), Cursor(3, 16)])
def test_works_are_the_same_for_any_number_of_workers(read, count, cursor):
    each = feed()
    assert len(each.plan(0)) == 17      # so that 20 works cross an epoch's edge
    plain = read(Simple(), each, cursor, 20)
    assert_equal(read(workers(count), each, cursor, 20), plain)
    assert [work.cursor for work in plain] == [each.after(at) for at in [cursor, *[work.cursor for work in plain[:-1]]]]


def test_ranks_with_workers_share_the_rows_of_one_without(read):
    def rows(works):
        return sorted(row for work in works for batch in work.batches for row in batch.tensors["tokens"].tolist())

    shares = [work for rank in range(3)
              for work in read(workers(1), feed(data_rank=rank, data_size=3), Cursor(0, 9), 4)]
    assert rows(shares) == rows(read(Simple(), feed(), Cursor(0, 9), 4))


def test_the_global_random_state_is_not_drawn_from(read):
    torch.manual_seed(5)
    before = torch.get_rng_state()
    read(workers(2), feed(), Cursor(), 3)
    assert torch.get_rng_state().equal(before)


@pytest.mark.parametrize("persistent", [True, False])
def test_reading_begins_anew_elsewhere(persistent):
    each = feed()
    reader, plain = (option.build(each, ALONE) for option in (workers(2, persistent=persistent), Simple()))
    before, processes = children(), []
    try:
        for cursor in (Cursor(0, 3), Cursor(2, 0), Cursor()):
            reader.seek(cursor), plain.seek(cursor)
            assert_equal(list(itertools.islice(reader, 5)), list(itertools.islice(plain, 5)))
            processes.append(children() - before)
    finally:
        reader.close()
    assert all(len(each) == 2 for each in processes)
    assert len(set.union(*processes)) == (2 if persistent else 6)


class Planned(Fixed):
    """Writes down where each epoch is planned."""

    path = None

    def plan(self, source, seed, epoch, global_batch):
        with open(self.path, "a") as file:
            file.write(f"{os.getpid()} {epoch} {threading.current_thread().name}\n")
        return super().plan(source, seed, epoch, global_batch)


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.parametrize("option, processes", [(Simple(), 1), (workers(0), 1), (workers(1), 2), (workers(3), 4)])
def test_every_process_plans_the_epochs_that_follow_in_a_thread_and_leaves_none(option, processes, tmp_path):
    batching = Planned(16, True)
    object.__setattr__(batching, "path", tmp_path / "planned")
    reader = option.build(feed(batching=batching), ALONE)
    try:
        assert_equal(list(itertools.islice(reader, 40)), list(itertools.islice(Simple().build(feed(), ALONE), 40)))
    finally:
        reader.close()
    assert "planner" not in [thread.name for thread in threading.enumerate()]
    lines = [line.split() for line in (tmp_path / "planned").read_text().splitlines()]
    assert len({process for process, _, _ in lines}) == processes
    assert {(int(epoch) > 0, name) for _, epoch, name in lines} == {(False, "MainThread"), (True, "planner")}
    assert {int(epoch) for _, epoch, _ in lines} >= {0, 1, 2}


def test_a_plan_that_fails_ahead_ends_the_reading_where_its_epoch_begins(tmp_path):
    """Or, with workers, by what they have under way before that."""
    class Short(Fixed):
        def plan(self, source, seed, epoch, global_batch):
            if epoch == 2:
                raise ConfigError("no second epoch")
            return super().plan(source, seed, epoch, global_batch)

    for option, least in ((Simple(), 34), (workers(0), 34), (workers(2), 34 - 2 * workers(2).prefetch_factor)):
        reader, arrived = option.build(feed(batching=Short(16, True)), ALONE), []
        with pytest.raises(ConfigError, match="no second epoch"):
            for work in reader:
                arrived.append(work)
        reader.close()
        assert_equal(arrived, list(itertools.islice(Simple().build(feed(), ALONE), len(arrived))))
        assert least <= len(arrived) <= 34


def test_closing_ends_the_workers():
    before = children()
    reader = workers(2).build(feed(), ALONE)
    next(iter(reader))
    assert len(children() - before) == 2
    started = time.perf_counter()
    reader.close()
    reader.close()
    assert children() == before and time.perf_counter() - started < 4


def test_a_worker_stuck_in_a_read_ends_with_its_rank(tmp_path):
    """torch's own worker would look whether its parent lives once it has read."""
    begun = multiprocessing.get_context("fork").Semaphore(0)

    class Stuck(Documents):
        def __getitem__(self, index):
            (tmp_path / "worker").write_text(str(os.getpid()))
            begun.release()
            time.sleep(1000)

    def rank():
        next(iter(workers(1).build(feed(Stuck()), ALONE)))

    process = multiprocessing.get_context("fork").Process(target=rank)
    process.start()
    assert begun.acquire(timeout=60)
    worker = int((tmp_path / "worker").read_text())
    process.kill()
    process.join()
    end = time.monotonic() + 30
    while Path(f"/proc/{worker}/stat").exists() and Path(f"/proc/{worker}/stat").read_text().split()[2] != "Z":
        assert time.monotonic() < end
        time.sleep(0.01)


def test_more_workers_than_cores_can_have_a_use_for_are_refused():
    with pytest.raises(ConfigError, match=r"dataloader\.workers=100000 on \d+ cores .* or to null"):
        workers(100_000).build(feed(), ALONE)


def test_a_reader_that_never_began_can_be_closed():
    workers(2).build(feed(), ALONE).close()
    Simple().build(feed(), ALONE).close()


def test_an_error_in_a_worker_keeps_its_sentence_and_type(read):
    def fail():
        raise UnreadableError("shard 7, byte 512: cut")

    for option in (Simple(), workers(1), workers(2)):
        started = time.perf_counter()
        with pytest.raises(UnreadableError, match=r"^shard 7, byte 512: cut$") as caught:
            read(option, feed(Documents(40, fail)), Cursor(), 17)
        assert type(caught.value) is UnreadableError and time.perf_counter() - started < 10


def test_what_was_read_before_an_error_still_arrives():
    def fail():
        raise UnreadableError("cut")

    each = feed(Documents(40, fail))
    whole = 0
    for _ in range(17):
        try:
            each[Cursor(0, whole)]
        except UnreadableError:
            break
        whole += 1
    reader = workers(2).build(each, ALONE)
    before, arrived = children(), []
    with pytest.raises(UnreadableError):
        for work in reader:
            arrived.append(work)
    assert len(arrived) == whole > 0 and children() == before


def test_a_crash_in_a_worker_keeps_its_type_and_shows_where(read):
    def fail():
        raise ZeroDivisionError("by zero")

    with pytest.raises(ZeroDivisionError) as caught:
        read(workers(2), feed(Documents(40, fail)), Cursor(), 17)
    assert str(caught.value) == "by zero"
    assert "In a data worker" in caught.value.__notes__[0] and "in fail" in caught.value.__notes__[0]


class Unsendable(Exception):
    def __init__(self, one, two):
        super().__init__(f"{one} and {two}")


def test_an_error_that_cannot_be_sent_is_described(read):
    def fail():
        raise Unsendable(1, 2)

    with pytest.raises(RuntimeError, match="Unsendable: 1 and 2"):
        read(workers(1), feed(Documents(40, fail)), Cursor(), 17)


@pytest.mark.dist
@pytest.mark.parametrize("fail, words", [
    pytest.param("os._exit(3)", "exited unexpectedly", id="exit"),
    pytest.param("os.kill(os.getpid(), signal.SIGKILL)", "killed by signal|exited unexpectedly", id="kill")])
def test_a_worker_that_dies_ends_the_run(fail, words, tmp_path):
    """In a process of its own: torch raises in whatever the main thread is doing when the signal comes."""
    program = tmp_path / "program.py"
    here = Path(__file__).parent
    program.write_text(f"import sys; sys.path[:0] = [{str(here)!r}, {str(here.parents[1])!r}]\n"
                       "from test_readers import *\nfrom forge.errors import ForgeError\n"
                       f"reader = workers(2).build(feed(Documents(40, lambda: {fail})), ALONE)\n"
                       "try:\n    list(itertools.islice(reader, 17))\n"
                       "except ForgeError as error:\n    print(error, flush=True)\n    os._exit(0)\n")
    done = subprocess.run([sys.executable, program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert re.search(f"DataLoader worker.*({words}).*lower dataloader.workers", done.stdout)


@pytest.mark.parametrize("first", [0, 1], ids=["starting", "reading"])
def test_workers_read_on_through_the_signals_of_an_ending_run(first):
    each, before = feed(), children()
    reader = workers(2).build(each, ALONE)
    try:
        works = iter(reader)
        found = list(itertools.islice(works, first))
        for child in children() - before:
            os.kill(child, signal.SIGINT)
            os.kill(child, signal.SIGTERM)
        found += list(itertools.islice(works, 10 - first))
        assert_equal(found, list(itertools.islice(Simple().build(each, ALONE), 10)))
    finally:
        reader.close()


@pytest.mark.dist
@pytest.mark.parametrize("ending", ["sys.exit(7)", "raise ValueError('end')"])
def test_a_process_that_ends_without_closing_takes_its_workers_along(ending, tmp_path):
    program = tmp_path / "program.py"
    here = Path(__file__).parent
    program.write_text(f"import sys; sys.path[:0] = [{str(here)!r}, {str(here.parents[1])!r}]\n"
                       "from test_readers import *\n"
                       "reader = workers(2).build(feed(), ALONE)\nworks = iter(reader)\nnext(works)\n"
                       f"print(*children(), flush=True)\n{ending}\n")
    started = time.perf_counter()
    done = subprocess.run([sys.executable, program], capture_output=True, text=True, timeout=60)
    assert done.returncode == (7 if "exit" in ending else 1)
    assert not [pid for pid in done.stdout.split() if os.path.exists(f"/proc/{pid}")]
    assert len(done.stdout.split()) == 2 and time.perf_counter() - started < 30


@pytest.mark.parametrize("cores, fraction, ranks, expected", [(16, 0.5, 1, 8), (16, 0.5, 4, 2), (2, 0.5, 1, 1),
                                                              (2, 0.5, 8, 1), (64, 0.25, 8, 2)])
def test_workers_share_the_cores_among_the_ranks_of_a_machine(monkeypatch, cores, fraction, ranks, expected):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(cores))
    option = workers(None, core_fraction=fraction)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    assert option._num_workers(Topology(torch.device("cpu"), 0, 0, 64, None)) == expected
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    assert option._num_workers(Topology(torch.device("cpu"), 0, 0, ranks, None)) == expected
    assert workers(3)._num_workers(ALONE) == 3


def test_settings_without_sense_are_problems():
    def problems(**changes):
        return " ".join(workers(None, **changes).problems(SimpleNamespace()))

    assert problems() == ""
    assert "dataloader.core_fraction=0" in problems(core_fraction=0) and "=2" in problems(core_fraction=2)
    assert "dataloader.prefetch_factor=0" in problems(prefetch_factor=0)
    assert "dataloader.workers=-1" in " ".join(workers(-1).problems(SimpleNamespace()))


def test_a_work_of_many_micro_batches_costs_one_open_file_each(read):
    each = feed(global_batch=200, micro_batch=1, batching=Fixed(4, True))
    before = len(os.listdir("/proc/self/fd"))
    works = read(workers(1), each, Cursor(), 3)
    assert sum(len(list(work.batches)) for work in works) == 600
    assert len(os.listdir("/proc/self/fd")) - before < 60


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_works_arrive_in_pinned_memory_where_there_is_a_gpu():
    each = feed()
    reader = workers(2).build(each, Topology(torch.device("cuda"), 0, 0, 1, None))
    try:
        works = list(itertools.islice(reader, 5))
        assert all(tensor.is_pinned() for work in works for batch in work.batches for tensor in batch.tensors.values())
        assert_equal(works, list(itertools.islice(Simple().build(each, ALONE), 5)))
    finally:
        reader.close()
