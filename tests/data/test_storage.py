"""Shards at an address that fsspec opens are read as those in a folder are."""

from collections import Counter
from typing import ClassVar

import numpy as np
import pytest
from tars import pairs, tar_bytes, written
from test_shards_option import option, texts

from forge.data.index import kept_index, make_index, open_index, save
from forge.data.storage import opened
from forge.errors import ConfigError, UnusableEnvironment

fsspec = pytest.importorskip("fsspec")
MemoryFileSystem = pytest.importorskip("fsspec.implementations.memory").MemoryFileSystem


@pytest.fixture
def address():
    memory = fsspec.filesystem("memory")
    for number in range(3):
        members = {f"{number}/{name}": data for name, data in pairs(6).items()}
        memory.pipe(f"/bucket/shards/{number:03}.tar", tar_bytes(members))
    yield "memory://bucket/shards"
    memory.rm("/bucket", recursive=True)


def test_an_address_is_read_as_a_folder_is(address, tmp_path):
    folder = tmp_path / "shards"
    folder.mkdir()
    memory = fsspec.filesystem("memory")
    for number in range(3):
        (folder / f"{number:03}.tar").write_bytes(memory.cat(f"/bucket/shards/{number:03}.tar"))
    here = option(folder).open("train")
    for setting in (address, f"{address}/*.tar", f"{address}/{{000..002}}.tar"):
        there = option(folder, train=setting).open("train")
        assert there.fingerprint == here.fingerprint and texts(there) == texts(here)
        assert np.array_equal(there.lengths, here.lengths)


def test_the_index_of_an_address_is_kept_in_the_cache(address, tmp_path):
    first = open_index(f"{address}/000.tar", tmp_path)
    assert len(list((tmp_path / "index").iterdir())) == 1
    again = open_index(f"{address}/000.tar", tmp_path)
    assert (again.checksums == first.checksums).all() and again.names == first.names
    fsspec.filesystem("memory").pipe("/bucket/shards/000.tar", tar_bytes(pairs(9)))
    assert len(open_index(f"{address}/000.tar", tmp_path).names) == 18


class Counting(MemoryFileSystem):
    """The same files, whose requests are counted."""

    protocol = "counting"
    calls: ClassVar[Counter[tuple[str, str]]] = Counter()

    @classmethod
    def _strip_protocol(cls, path):
        return super()._strip_protocol(path.replace("counting://", "memory://"))

    def _open(self, path, *arguments, **options):
        self.calls["open", path.rpartition(".")[2]] += 1
        return super()._open(path, *arguments, **options)

    def info(self, path, **options):
        if "." in path:
            self.calls["info", path.rpartition(".")[2]] += 1
        return super().info(path, **options)


@pytest.fixture
def counted(address):
    fsspec.register_implementation("counting", Counting)
    Counting.calls.clear()
    return address.replace("memory://", "counting://")


def asked(train, folder):
    """What both splits of a run, opened one after the other, ask of storage."""
    Counting.calls.clear()
    for split in ("train", "heldout"):
        option(folder, train=train, heldout_fraction=0.5).open(split)
    return {what: count for what, count in Counting.calls.items() if what[0] == "open"}


def test_each_shard_is_opened_once_to_be_indexed_and_never_again(counted, tmp_path):
    assert asked(counted, tmp_path / "here") == {("open", "tar"): 3}
    assert Counting.calls["info", "tar"] == 3 + 3, "a split asks once whether a shard is still the same"
    assert asked(counted, tmp_path / "here") == {}


def test_an_index_at_an_address_is_fetched_once(counted, tmp_path):
    for number in range(3):
        address = f"{counted}/{number:03}.tar"
        save(make_index(address), written(tmp_path / "made", b""))
        fsspec.filesystem("memory").put(str(tmp_path / "made"), f"/bucket/shards/{number:03}.tar.index")
    assert asked(counted, tmp_path / "here") == {("open", "index"): 3}
    assert asked(counted, tmp_path / "here") == {}
    fsspec.filesystem("memory").pipe("/bucket/shards/000.tar", tar_bytes(pairs(9)))
    assert asked(counted, tmp_path / "here") == {("open", "index"): 1, ("open", "tar"): 1}


def test_an_old_index_in_the_cache_is_not_preferred_to_a_new_one_at_the_address(counted, tmp_path):
    address = f"{counted}/000.tar"
    open_index(address, tmp_path)
    fsspec.filesystem("memory").pipe("/bucket/shards/000.tar", tar_bytes(pairs(9)))
    save(make_index(address), written(tmp_path / "made", b""))
    fsspec.filesystem("memory").put(str(tmp_path / "made"), "/bucket/shards/000.tar.index")
    Counting.calls.clear()
    assert len(open_index(address, tmp_path).names) == len(kept_index(address, tmp_path).names) == 18
    assert Counting.calls["open", "tar"] == 0 and Counting.calls["open", "index"] == 1


def test_what_is_not_there_is_a_sentence(address, tmp_path):
    with pytest.raises(ConfigError, match=r"data\.train=memory://nowhere does not exist"):
        option(tmp_path, train="memory://nowhere").open("train")
    with pytest.raises(ConfigError, match="no address that fsspec knows"):
        option(tmp_path, train="gopher://x/y.tar").open("train")
    with pytest.raises(UnusableEnvironment, match=r"Cannot read memory://bucket/none\.tar"), \
            opened("memory://bucket/none.tar"):
        pass
