"""Shards at an address that fsspec opens are read as those in a folder are."""

import numpy as np
import pytest
from tars import pairs, tar_bytes
from test_shards_option import option, texts

from forge.data.index import open_index
from forge.data.storage import opened
from forge.errors import ConfigError, UnusableEnvironment

fsspec = pytest.importorskip("fsspec")


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


def test_what_is_not_there_is_a_sentence(address, tmp_path):
    with pytest.raises(ConfigError, match=r"data\.train=memory://nowhere does not exist"):
        option(tmp_path, train="memory://nowhere").open("train")
    with pytest.raises(ConfigError, match="no address that fsspec knows"):
        option(tmp_path, train="gopher://x/y.tar").open("train")
    with pytest.raises(UnusableEnvironment, match=r"Cannot read memory://bucket/none\.tar"), \
            opened("memory://bucket/none.tar"):
        pass
