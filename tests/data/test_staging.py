"""Copies ahead of use: whole, verified, bounded, and never in a reader's way."""

import time

import pytest
from tars import pairs, tar_bytes, written
from test_shards_option import option

from forge.batch import Cursor
from forge.batching.packed import Packed
from forge.data.staging import Staging
from forge.feed import Feed


def staging(folder, **changes):
    settings = {"folder": str(folder), "max_gb": 1.0, "memory_gb": 0.0, "ahead": 1, "copies": 2, "pins": None}
    return Staging(**settings | changes)


@pytest.fixture
def folder(tmp_path):
    for number in range(8):
        members = {f"{number}/{name}": data + bytes([65 + number]) for name, data in pairs(6).items()}
        written(tmp_path / "shards" / f"{number:03}.tar", tar_bytes(members))
    return tmp_path / "shards"


def feed_of(folder, **changes):
    settings = {"heldout": str(folder), "shuffle_shards": 2, **changes}
    return Feed(option(folder, **settings).open("train"), Packed(64, 64), 1, 4, 4, 0, 1)


def tensors(feed, epochs):
    read, cursor = [], Cursor()
    while cursor.epoch < epochs:
        work = feed[cursor]
        read.append([batch.tensors["tokens"].tolist() for batch in work.batches])
        cursor = work.cursor
    return read


def until(true, seconds=20):
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_what_is_read_through_copies_is_what_is_read_without(folder, tmp_path):
    plain = tensors(feed_of(folder), 2)
    staged = feed_of(folder, staging=staging(tmp_path / "staged"))
    assert tensors(staged, 2) == plain
    until(lambda: len(list((tmp_path / "staged").glob("*.tar"))) >= 2)
