"""Whoever is killed while shards are copied and read, nothing is lost and nothing comes twice."""

import itertools
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from conftest import TINY, Finished, forge, train_here

from forge.batch import Cursor
from forge.batching.packed import Packed
from forge.data import copying
from forge.data.pack import pack
from forge.data.shards import Shards
from forge.data.staging import Staging
from forge.dataloader.workers import FromWorkers
from forge.feed import Feed

FORK = multiprocessing.get_context("fork")
NUM_TEXTS = 240


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Ten shards of texts, each of which is another."""
    folder = tmp_path_factory.mktemp("texts")
    texts = [(f"{number:03}", f"{number:03} ".encode() * (8 + number % 13)) for number in range(NUM_TEXTS)]
    for shard in range(10):
        (path,) = pack(texts[shard::10], folder / "packed" / str(shard), 1 << 20)
        path.rename(folder / f"{shard:02}.tar")
    return folder


def feed_of(folder, tmp_path, data_rank=0, data_size=1):
    """staging holds half of the shards, so that copies come and go."""
    half = sum(path.stat().st_size for path in folder.glob("*.tar")) / 2
    staging = Staging(str(tmp_path / "staged"), half / 1e9, 0.0, 1, 2, None)
    data = Shards(train=str(folder), heldout=str(folder), weights=None, heldout_fraction=0.5, tokenizer="bytes",
                  text_field="txt", pictures=None, labels=None, arrays=None, conversation=None,
                  key_dot="first", keep_empty=False,
                  invalid_utf8="keep", shuffle_shards=2, max_bad=0.0, bad_floor=0, staging=staging,
                  cache=str(tmp_path / "cache"))
    return Feed(data.open("train"), Packed(80, 16), 3, 6, 6 // data_size, data_rank, data_size)


def texts_in(works):
    """The number of each text of some works, sorted."""
    found = []
    for work in works:
        for batch in work.batches:
            starts = batch.tensors["positions"] == 0
            for row, places in zip(batch.tensors["tokens"].tolist(), starts.tolist(), strict=True):
                found += [bytes(row[at:at + 3]) for at in np.flatnonzero(places) if any(row[at:at + 3])]
    return sorted(found)


def until(true, seconds=30):
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.002)


def test_a_rank_that_is_killed_while_it_copies_leaves_nothing_half_and_another_goes_on(folder, tmp_path, monkeypatch):
    """The process that copies is killed in the middle of a shard, after three updates; a new one reads on."""
    def rank(told):
        monkeypatch.setattr(copying, "_AT_A_TIME", 512)
        whole = copying.open_file

        def slow(location, ahead=0):
            time.sleep(0.05 if location.parent == folder else 0)
            file = whole(location)
            if location.parent == folder:
                file.read = lambda size, offset, read=file.read: (time.sleep(0.004), read(size, offset))[1]
            return file

        monkeypatch.setattr(copying, "open_file", slow)
        feed, cursor = feed_of(folder, tmp_path), Cursor()
        for _ in range(3):
            feed.coming(cursor)
            work = feed[cursor]
            cursor = work.cursor
            told.send(work)
        signal.pause()

    ours, theirs = FORK.Pipe(duplex=False)
    process = FORK.Process(target=rank, args=(theirs,), daemon=True)
    process.start()
    works = [ours.recv() for _ in range(3)]
    staged = tmp_path / "staged"
    until(lambda: any(part.stat().st_size for part in staged.glob("*.part")))
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    assert list(staged.glob("*.part")), "it was killed too late to show anything"
    feed, cursor = feed_of(folder, tmp_path), works[-1].cursor
    while cursor.epoch == 0:
        feed.coming(cursor)
        works.append(feed[cursor])
        cursor = works[-1].cursor
    assert texts_in(works) == sorted(f"{number:03}".encode() for number in range(NUM_TEXTS))
    until(lambda: len(list(staged.glob("*.tar"))) >= 2 and not list(staged.glob("*.part")))
    whole = {path.stem: path.read_bytes() for path in folder.glob("*.tar")}
    for path in staged.glob("*.tar"):
        assert path.read_bytes() == whole[path.name.partition("-")[0]]


@pytest.mark.parametrize("persistent, third", [(True, 13), (False, 4)], ids=["persistent", "anew"])
def test_forty_short_epochs_leave_nothing_behind(folder, tmp_path, persistent, third):
    """Memory, open files and shared memory after two thirds of the epochs are those after all; then all is closed.
    Workers that begin anew with each epoch are slower to come, so there are fewer epochs."""
    feed = feed_of(folder, tmp_path)
    reader = FromWorkers(feed, 1, 2, persistent, False)
    before, figures = children(), []
    for epochs in (range(third), range(third, 2 * third), range(2 * third, 3 * third + 1)):
        if persistent:
            reader.seek(Cursor(epochs.start))
            works = iter(reader)
        for epoch in epochs:
            if not persistent:
                reader.seek(Cursor(epoch))
                works = iter(reader)
            read = list(itertools.islice(works, len(feed.plan(epoch))))
            assert len(texts_in(read)) == NUM_TEXTS and read[-1].cursor == Cursor(epoch + 1)
            del read
        (worker,) = children() - before
        figures.append([resident(os.getpid()), resident(worker), len(os.listdir(f"/proc/{worker}/fd")),
                        len(os.listdir("/proc/self/fd")), len(os.listdir("/dev/shm"))])
    reader.close()
    first, last = figures[1:]
    assert last[0] - first[0] < 4 << 20 and last[1] - first[1] < 4 << 20, figures
    assert all(end - start <= 4 for start, end in zip(first[2:], last[2:], strict=True)), figures   # in flight
    assert children() == before


def children():
    return {int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()}


def resident(process):
    return int(Path(f"/proc/{process}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def descendants(process):
    try:
        found = [int(pid) for pid in Path(f"/proc/{process}/task/{process}/children").read_text().split()]
    except OSError:
        return []
    return found + [each for pid in found for each in descendants(pid)]


@pytest.mark.dist
@pytest.mark.slow
def test_a_run_whose_worker_and_then_whose_rank_is_killed_is_the_run_that_was_never_touched(folder, tmp_path):
    """The losses of all updates, to the bit: so each was made of the same texts."""
    staging = f"{{folder: {tmp_path}/staged, max_gb: 0.00015, memory_gb: 0, ahead: 1, copies: 2, pins: null}}"
    line = ["data=shards", f"data.train={folder}", f"data.heldout={folder}", "data.shuffle_shards=2",
            "batching=packed", "sequence_length=80", f"data.staging={staging}", f"data.cache={tmp_path}/cache",
            "dataloader=webdataset", "dataloader.workers=1", "snapshot=inline", "snapshot.every=2", "steps=18"]
    broken = tmp_path / "broken"
    metrics = broken / "metrics.jsonl"
    for start, step, depth in ((f"run_dir={broken}", 3, -1), (f"resume={broken}", 10, 0)):
        run = subprocess.Popen([sys.executable, "-m", "forge.train", *TINY, *line, start],
                               stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        until(lambda step=step: metrics.exists() and f'"step": {step},' in metrics.read_text(), 90)
        os.kill(descendants(run.pid)[depth], signal.SIGKILL)        # the rank's worker first, then the rank
        assert run.wait(60) not in (0, None)
        assert "snapshots" in os.listdir(broken) and run.stderr.read()
    done = forge("train", *TINY, *line, f"resume={broken}")
    assert done.returncode == 0, done.stderr
    whole = train_here(tmp_path / "whole", *line[:6], "data.staging=null", *line[7:])
    assert Finished(0, "", "", broken).losses == whole.losses and list(whole.losses) == list(range(1, 19))
