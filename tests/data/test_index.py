"""An index is made once, is trusted only while it fits its shard, and never runs anything."""

import errno
import multiprocessing
import os
import pickle
import signal
import sys
import time
import zlib

import numpy as np
import pytest
from tars import pairs, tar_bytes, written

from forge import notes
from forge.data import disk
from forge.data import index as index_module
from forge.data.index import load, make_index, open_index, save
from forge.errors import UnusableEnvironment

MEMBERS = pairs(5)


@pytest.fixture
def shard(tmp_path):
    return written(tmp_path / "shards" / "a.tar", tar_bytes(MEMBERS))


def beside(shard):
    return shard.with_name("a.tar.index")


def test_an_index_says_where_members_lie(shard, tmp_path):
    index = open_index(shard, tmp_path)
    data = shard.read_bytes()
    parts = [data[at:at + size] for at, size in zip(index.offsets, index.sizes, strict=True)]
    assert index.names == list(MEMBERS) and parts == list(MEMBERS.values())
    assert index.checksums.tolist() == [zlib.crc32(part) for part in parts]


def test_an_index_is_made_once(shard, tmp_path, monkeypatch):
    first = open_index(shard, tmp_path)
    monkeypatch.setattr(index_module, "make_index", lambda path: pytest.fail("made again"))
    again = open_index(shard, tmp_path)
    assert again.names == first.names and (again.offsets == first.offsets).all()
    assert (again.sizes == first.sizes).all() and (again.checksums == first.checksums).all()
    assert [path.name for path in shard.parent.iterdir()] != [] and not list(shard.parent.glob("*.tmp"))


@pytest.mark.parametrize("change", ["size", "mtime"])
def test_a_shard_that_changed_is_indexed_again(shard, tmp_path, change):
    open_index(shard, tmp_path)
    shard.write_bytes(tar_bytes(pairs(6 if change == "size" else 5)))
    os.utime(shard, ns=(1, 1))
    assert open_index(shard, tmp_path).version == 1
    assert len(open_index(shard, tmp_path).names) == (12 if change == "size" else 10)


@pytest.mark.parametrize("damage", [b"", b"PK\x03\x04 nonsense", None])
def test_a_damaged_index_is_made_again(shard, tmp_path, damage):
    names = open_index(shard, tmp_path).names
    whole = beside(shard).read_bytes()
    beside(shard).write_bytes(whole[:len(whole) // 2] if damage is None else damage)
    assert open_index(shard, tmp_path).names == names
    assert load(beside(shard), shard) is not None


class Payload:
    def __reduce__(self):
        return os.mkdir, (sys.argv[0] + ".payload",)


def test_an_index_that_holds_code_does_not_run_it(shard, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", [str(tmp_path / "ran")])
    head = np.array([1, 2, 3, 1], np.int64)
    np.savez(tmp_path / "evil.npz", head=head, names=np.array([Payload()], object), offsets=head, sizes=head,
             checksums=head)
    beside(shard).write_bytes((tmp_path / "evil.npz").read_bytes())
    assert open_index(shard, tmp_path).names == list(MEMBERS)
    beside(shard).write_bytes(pickle.dumps(Payload()))
    assert open_index(shard, tmp_path).names == list(MEMBERS)
    assert not (tmp_path / "ran.payload").exists()


def test_the_cache_holds_the_index_where_the_shard_s_folder_cannot(shard, tmp_path, monkeypatch):
    beside(shard).mkdir()       # os.replace cannot take its place, as in a folder that is read-only
    open_index(shard, tmp_path / "cache")
    assert len(list((tmp_path / "cache" / "index").iterdir())) == 1
    monkeypatch.setattr(index_module, "make_index", lambda path: pytest.fail("made again"))
    assert open_index(shard, tmp_path / "cache").names == list(MEMBERS)


def test_names_that_are_not_utf8_survive(tmp_path):
    name = b"caf\xe9.txt".decode("utf-8", "surrogateescape")
    shard = written(tmp_path / "a.tar", tar_bytes({name: b"1"}))
    open_index(shard, tmp_path)
    assert open_index(shard, tmp_path).names == [name]


def test_damage_is_said_with_shard_and_byte_whenever_it_is_opened(tmp_path, caplog, monkeypatch):
    shard = written(tmp_path / "a.tar", tar_bytes(MEMBERS)[:6000])
    first = open_index(shard, tmp_path)
    monkeypatch.setattr(notes, "_said", set())
    again = open_index(shard, tmp_path)
    assert first.names == list(MEMBERS)[:len(first.names)] == again.names and first.names
    assert first.faults == again.faults and [fault.harmless for fault in first.faults] == [False]
    assert caplog.text.count(f"{shard}, byte {first.faults[0].offset}: member") == 2


def test_an_index_knows_texts_and_pictures(tmp_path):
    long = "\u00e9" * (1 << 20)            # more bytes than are read at a time
    png = b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR" + (640).to_bytes(4, "big") + (480).to_bytes(4, "big")
    members = {"a.txt": "\u65e5\u672c".encode(), "b.txt": b"\xef\xbb\xbfabc", "c.txt": b" \n\t", "d.txt": b"",
               "e.txt": b"caf\xe9", "f.txt": b"cut \xc3", "g.txt": long.encode(),
               "h.png": png, "i.txt": "x".encode("utf-16")}
    shard = written(tmp_path / "a.tar", tar_bytes(members))
    for index in (open_index(shard, tmp_path), open_index(shard, tmp_path)):
        assert index.characters.tolist() == [2, 3, 0, 0, -1, -1, 1 << 20, -1, -1]
        assert np.flatnonzero(index.marks).tolist() == [1]
        assert index.pictures[7].tolist() == [640, 480] and not index.pictures[:7].any()


def test_a_shard_that_is_gone_is_a_sentence(tmp_path):
    with pytest.raises(UnusableEnvironment, match=r"Cannot read .*gone\.tar \(No such file"):
        make_index(tmp_path / "gone.tar")


def _open_often(shard, cache, barrier, results):
    barrier.wait()
    results.put(open_index(shard, cache).names)


def test_several_processes_may_index_at_once(shard, tmp_path):
    context = multiprocessing.get_context("fork")
    barrier, results = context.Barrier(4), context.Queue()
    workers = [context.Process(target=_open_often, args=(shard, tmp_path, barrier, results)) for _ in range(4)]
    for worker in workers:
        worker.start()
    assert [results.get(timeout=30) for _ in workers] == [list(MEMBERS)] * 4
    for worker in workers:
        worker.join()
    assert sorted(path.name for path in shard.parent.iterdir()) == ["a.tar", "a.tar.index"]


def test_saving_that_fails_leaves_nothing(shard, tmp_path, monkeypatch):
    index = make_index(shard)

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "savez", full)
    with pytest.raises(OSError, match="No space"):
        save(index, tmp_path / "a.index")
    assert [path.name for path in tmp_path.iterdir()] == ["shards"]


FORK = multiprocessing.get_context("fork")


class Indexing:
    """Processes that open an index, of which each that makes one writes it down and waits for `go`, a file: one that is
    killed holds nothing of it."""

    def __init__(self, shard, cache):
        self.shard, self.cache, self.go = shard, cache, cache / "go"
        self.begun, self.waiting = FORK.Semaphore(0), FORK.Semaphore(0)

    def start(self):
        process = FORK.Process(target=self.run, daemon=True)
        process.start()
        return process

    def run(self):
        def slowly(path):
            with open(self.cache / "made", "a") as file:
                file.write(f"{os.getpid()}\n")
            self.begun.release()
            while not self.go.exists():
                time.sleep(0.005)
            return make_index(path)

        disk._PATIENCE = 0.0
        disk.say = lambda sentence: (sentence.startswith(f"Another process indexes {self.shard}: ")
                                     and self.waiting.release())
        index_module.make_index = slowly
        assert open_index(self.shard, self.cache).names == list(MEMBERS)

    def made(self):
        return (self.cache / "made").read_text().split()


def ended(*processes):
    for process in processes:
        process.join(60)
    return [process.exitcode for process in processes]


def test_of_several_processes_one_makes_an_index_and_the_others_wait(shard, tmp_path):
    indexing = Indexing(shard, tmp_path)
    first = indexing.start()
    assert indexing.begun.acquire(timeout=60)
    others = [indexing.start() for _ in range(2)]
    assert all(indexing.waiting.acquire(timeout=60) for _ in others)
    indexing.go.touch()
    assert ended(first, *others) == [0, 0, 0] and indexing.made() == [str(first.pid)]
    assert not list((tmp_path / "indexing").iterdir())


def test_a_process_that_is_killed_while_it_makes_an_index_blocks_nobody(shard, tmp_path):
    indexing = Indexing(shard, tmp_path)
    first = indexing.start()
    assert indexing.begun.acquire(timeout=60)
    other = indexing.start()
    assert indexing.waiting.acquire(timeout=60)
    os.kill(first.pid, signal.SIGKILL)
    indexing.go.touch()
    assert ended(first, other) == [-signal.SIGKILL, 0] and indexing.made() == [str(first.pid), str(other.pid)]


@pytest.mark.parametrize("lack", ["locks", "cache"])
def test_without_locks_each_process_makes_its_own(lack, shard, tmp_path, monkeypatch):
    def refused(*_):
        raise OSError(errno.ENOLCK, "no locks here")

    cache = tmp_path
    if lack == "locks":
        monkeypatch.setattr("fcntl.flock", refused)
    else:
        cache = written(tmp_path / "a_file", b"") / "below"
    assert open_index(shard, cache).names == list(MEMBERS) and beside(shard).exists()
