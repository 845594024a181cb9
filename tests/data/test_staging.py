"""Copies ahead of use: whole, verified, bounded, and never in a reader's way."""

import json
import os
import threading
import time
from collections import Counter
from types import SimpleNamespace

import pytest
from tars import flip_on_disk, pairs, tar_bytes, with_byte, written
from test_shards_option import option

from forge.batch import Cursor
from forge.batching.packed import Packed
from forge.data import copying, texts
from forge.data.pins import Pins
from forge.data.room import Room
from forge.data.staging import Staging
from forge.data.storage import open_file
from forge.errors import ConfigError, UnusableEnvironment
from forge.feed import Feed

CONFIG = SimpleNamespace(model=SimpleNamespace(vocab_size=256))
NUM_SHARDS = 8
TEXT = 1540             # a byte of the first text of a shard


def staging(folder, **changes):
    settings = {"folder": str(folder), "max_gb": 1.0, "memory_gb": 0.0, "ahead": 1, "copies": 2, "pins": None}
    return Staging(**settings | changes)


@pytest.fixture
def folder(tmp_path):
    for number in range(NUM_SHARDS):
        members = {f"{number}/{name}": data + bytes([65 + number]) for name, data in pairs(6).items()}
        written(tmp_path / "shards" / f"{number:03}.tar", tar_bytes(members))
    return tmp_path / "shards"


@pytest.fixture
def staged(tmp_path):
    return tmp_path / "staged"


def feed_of(folder, **changes):
    settings = {"heldout": str(folder), "shuffle_shards": 2, **changes}
    return Feed(option(folder, **settings).open("train"), Packed(64, 64), 1, 4, 4, 0, 1)


def tensors(feed, epochs, after=lambda: None):
    """All of some epochs. after: called behind each update."""
    read, cursor = [], Cursor()
    while cursor.epoch < epochs:
        feed.coming(cursor)
        work = feed[cursor]
        read.append([batch.tensors["tokens"].tolist() for batch in work.batches])
        cursor = work.cursor
        after()
    return read


def until(true, seconds=30):
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.005)


def copies(staged):
    """The shards that have copies."""
    return {path.name.split("-")[0] for path in staged.glob("*.tar")}


def test_what_is_read_through_copies_is_what_is_read_without(folder, staged):
    feed = feed_of(folder, staging=staging(staged, memory_gb=1.0))
    assert tensors(feed, 1) == tensors(feed_of(folder), 1)
    until(lambda: len(copies(staged)) >= 2)
    windows, here = feed.source.coming.__self__, feed.source.coming.__self__._here()
    tensors(feed, 3, lambda: until(lambda: not ahead(windows, here) - copies(staged)))
    assert copies(staged) == {f"{number:03}" for number in range(NUM_SHARDS)}
    for path in folder.iterdir():
        path.unlink()                   # so that what comes now comes from copies
    feed.source._tokens._kept.clear()
    assert tensors(feed, 3) == tensors(feed_of_copies(staged, folder), 3)


def ahead(windows, here):
    """The shards that the plan wants there."""
    following = windows._following(*here.at)
    return {windows._shards[number].name.split("-")[0] for number in following}


def feed_of_copies(staged, folder):
    """The shards as they were, under their names."""
    for path in staged.glob("*.tar"):
        written(folder / f"{path.name.split('-')[0]}.tar", path.read_bytes())
    return feed_of(folder)


def test_the_bound_holds_and_epochs_go_on_in_little_room(folder, staged):
    sizes = [path.stat().st_size for path in folder.glob("*.tar")]
    bound = int(4.5 * max(sizes))
    feed = feed_of(folder, staging=staging(staged, max_gb=bound / 1e9))
    windows, here = feed.source.coming.__self__, feed.source.coming.__self__._here()
    seen = set()

    def look():
        until(lambda: not ahead(windows, here) - copies(staged))        # the next window is there before it is read
        seen.update(copies(staged))
        assert sum(path.stat().st_size for path in staged.iterdir() if path.suffix in (".tar", ".part")) <= bound

    assert tensors(feed, 3, look) == tensors(feed_of(folder), 3)
    assert len(seen) == NUM_SHARDS > len(copies(staged))


def test_all_that_come_next_are_asked_for_at_once_in_the_order_of_need(folder, staged, monkeypatch):
    asked, claim = [], Room.claim
    monkeypatch.setattr(Room, "claim", lambda room, sizes, use: asked.append(list(sizes)) or claim(room, sizes, use))
    feed = feed_of(folder, staging=staging(staged, ahead=2, copies=1))
    other = Room(staged, 10**9, 1)
    _, part = claim(other, {"other.tar": 1}, lambda name: 0.0)          # no other copy is made meanwhile
    feed.coming(Cursor())
    until(lambda: len(asked) >= 2)
    windows, here = feed.source.coming.__self__, feed.source.coming.__self__._here()
    coming = [windows._shards[number].name for number in windows._following(*here.at)]
    assert len(coming) == 4 and asked[:2] == [coming, coming]
    other.give_up("other.tar", part)
    until(lambda: len(copies(staged)) == 4)
    assert [len(sizes) for sizes in asked[-4:]] == [4, 3, 2, 1]


class Spoilt:
    """A shard whose bytes are not those that were indexed, as storage gives them to the copier."""

    def __init__(self, file, data, stall=None):
        self.size, self.version, self._data, self._stall = file.size, file.version, data, stall

    def read(self, size, offset):
        if self._stall is not None and offset:
            self._stall.wait()
        return self._data[offset:offset + size]


def spoil(monkeypatch, folder, make):
    def opened(location, ahead=0):
        file = open_file(location)
        return make(file, file.read(file.size, 0)) if location.parent == folder else file

    monkeypatch.setattr(copying, "open_file", opened)


PAGE = b"<!DOCTYPE html><html><body><h1>503 Service Unavailable</h1></body></html>" * 2000
SPOILT = {"an error page": lambda data: PAGE[:len(data)], "half": lambda data: data[:len(data) // 2],
          "a flipped byte": lambda data: with_byte(data, TEXT, data[TEXT] ^ 1), "nothing": lambda data: b"",
          "twice": lambda data: data + data}


@pytest.mark.parametrize("kind", SPOILT)
def test_a_bad_transfer_is_no_copy_and_is_counted(kind, folder, staged, monkeypatch, caplog):
    spoil(monkeypatch, folder, lambda file, data: Spoilt(file, SPOILT[kind](data)))
    feed = feed_of(folder, staging=staging(staged))
    copier = feed.source.coming.__self__._here().copier
    assert tensors(feed, 1) == tensors(feed_of(folder), 1)
    until(lambda: copier.num_failed >= 2)
    until(lambda: not list(staged.glob("*.part")))
    assert not copies(staged)
    assert "was not copied to" in caplog.text and "read where it lies; 2 such failures" in caplog.text


def test_a_shard_that_changes_while_it_is_copied_is_no_copy(folder, staged, monkeypatch):
    def change(file, data):
        for path in folder.glob("*.tar"):
            path.touch()
        return Spoilt(file, data)

    spoil(monkeypatch, folder, change)
    feed = feed_of(folder, staging=staging(staged))
    copier = feed.source.coming.__self__._here().copier
    assert tensors(feed, 1) == tensors(feed_of(folder), 1)
    until(lambda: copier.num_failed >= 1)
    assert not copies(staged)


def test_a_reader_does_not_wait_for_a_copy_that_stands_still(folder, staged, monkeypatch):
    monkeypatch.setattr(copying, "_AT_A_TIME", 1000)
    going = threading.Event()
    spoil(monkeypatch, folder, lambda file, data: Spoilt(file, data, stall=going))
    feed = feed_of(folder, staging=staging(staged))
    assert tensors(feed, 2) == tensors(feed_of(folder), 2) and not copies(staged)
    assert [path.stat().st_size for path in staged.glob("*.part")] == [1000]
    going.set()
    until(lambda: copies(staged))


@pytest.mark.parametrize("change, reason", [
    (lambda path: path.write_bytes(tar_bytes(pairs(9))), "a change since it was indexed"),
    (lambda path: path.write_bytes(b""), "a change since it was indexed"), (os.unlink, "an error in reading")])
def test_a_shard_that_changes_while_it_is_read_is_dropped_and_counted(folder, change, reason, monkeypatch):
    monkeypatch.setattr(texts, "PAUSES", ())
    feed = feed_of(folder, max_bad=1.0)
    first = feed[Cursor()]
    changed = feed.source.order(1, 0)[0]
    number = int(feed.source._samples.texts.shards[changed[-1]])       # of a window that has not come yet
    change(folder / f"{number:03}.tar")
    counted = Counter(first.batches[0].reads.bad)
    while first.cursor.epoch == 0:
        first = feed[first.cursor]
        counted.update(bad for batch in first.batches for bad in batch.reads.bad)
    assert set(counted) == {(reason, number)} and counted.total() >= 6


def test_what_is_read_out_of_turn_starts_no_copies(folder, staged):
    """A rehearsal before the first update, or an update that is looked at again: nobody goes on from there."""
    feed = feed_of(folder, staging=staging(staged))
    assert feed[Cursor()].batches and feed.source.coming.__self__._here().copier._thread is None


def test_the_windows_of_the_next_epoch_are_found_by_the_thread_that_copies(folder, staged):
    feed = feed_of(folder, staging=staging(staged))
    windows, ordered = feed.source.coming.__self__, []
    order = windows._order
    windows._order = lambda seed, epoch: ordered.append((epoch, threading.current_thread().name)) or order(seed, epoch)
    feed.coming(Cursor())
    until(lambda: len(copies(staged)) == 2)
    assert ordered == [(0, "MainThread"), (1, "copier")]


def test_a_copy_that_goes_bad_is_thrown_away_and_the_shard_is_read(folder, staged, caplog):
    plain = tensors(feed_of(folder), 2)
    feed = feed_of(folder, staging=staging(staged, ahead=4))
    tensors(feed, 1)
    until(lambda: len(copies(staged)) == NUM_SHARDS)
    for path in staged.glob("*.tar"):
        for at in range(600, path.stat().st_size, 512):
            flip_on_disk(path, at)
    again = feed_of(folder, staging=staging(staged, ahead=4))
    assert tensors(again, 2) == plain
    assert "is not what was copied there: it is thrown away" in caplog.text


def test_a_folder_that_cannot_be_used_is_told_and_shards_are_read(folder, tmp_path, caplog):
    written(tmp_path / "file", b"")
    feed = feed_of(folder, staging=staging(tmp_path / "file"))
    copier = feed.source.coming.__self__._here().copier
    assert tensors(feed, 1) == tensors(feed_of(folder), 1)
    until(lambda: f"{tmp_path / 'file'} cannot be used" in caplog.text)
    assert copier.num_failed


def test_a_plan_that_fails_is_told_as_what_it_is(folder, staged, caplog):
    copier = feed_of(folder, staging=staging(staged)).source.coming.__self__._here().copier
    copier.aim(lambda: 1 // 0)
    until(lambda: "what is read next cannot be planned (integer" in caplog.text)
    assert copier.num_failed and "cannot be used" not in caplog.text


def test_more_than_the_disk_has_is_refused(folder, staged, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=1000))
    with pytest.raises(UnusableEnvironment, match=r"staged needs .* lower data\.staging\.max_gb, or set data\.staging"):
        feed_of(folder, staging=staging(staged))


def test_pinned_shards_stay(folder, staged, tmp_path):
    lines = [{"shard": "005.tar", "score": 0.5}, {"shard": "005.tar", "score": 0.4}, {"shard": "shards/002.tar",
             "score": 0.8}, {"shard": "001.tar", "score": 0.1}]
    scores = written(tmp_path / "scores.jsonl", "".join(f"{json.dumps(line)}\n" for line in lines).encode())
    size = max(path.stat().st_size for path in folder.glob("*.tar"))
    pins = Pins(str(scores), 0.35)
    feed = feed_of(folder, staging=staging(staged, max_gb=6.5 * size / 1e9, pins=pins))
    assert [shard.location.name for shard in feed.source.coming.__self__._pinned] == ["005.tar", "002.tar"]
    windows, here = feed.source.coming.__self__, feed.source.coming.__self__._here()
    feed.coming(Cursor())
    feed[Cursor()]
    until(lambda: {"005", "002"} <= copies(staged))

    def look():
        until(lambda: not ahead(windows, here) - copies(staged))
        assert {"005", "002"} <= copies(staged)

    assert tensors(feed, 3, look) == tensors(feed_of(folder), 3)


def test_copies_that_come_next_are_read_into_memory_as_far_as_is_allowed(folder, staged, monkeypatch):
    advised = []
    monkeypatch.setattr("os.posix_fadvise", lambda *arguments: advised.append(arguments[3]))
    size = max(path.stat().st_size for path in folder.glob("*.tar"))
    feed = feed_of(folder, staging=staging(staged, ahead=4))
    tensors(feed, 2)
    until(lambda: len(copies(staged)) == NUM_SHARDS)
    assert not advised
    feed = feed_of(folder, staging=staging(staged, ahead=4, memory_gb=4 * size / 1e9))
    feed.coming(Cursor())
    feed[Cursor()]
    until(lambda: len(advised) >= 4)
    assert set(advised) == {os.POSIX_FADV_WILLNEED} and len(advised) == 4


@pytest.mark.parametrize("text, words", [(b"{}\n", "line 1: "), (b'{"shard": "000.tar", "score": 1}\n[]\n', "line 2: "),
                                         (b'{"shard": "none.tar", "score": 1}\n', "no score to any shard")])
def test_scores_that_say_nothing_are_a_sentence(folder, staged, tmp_path, text, words):
    scores = written(tmp_path / "scores.jsonl", text)
    with pytest.raises(ConfigError, match=f"data.staging.pins.scores={scores}.*{words}"):
        feed_of(folder, staging=staging(staged, pins=Pins(str(scores), 0.5)))


@pytest.mark.parametrize("changes, words", [
    ({"max_gb": 0.0}, "data.staging.max_gb=0.0"), ({"memory_gb": -1.0}, "data.staging.memory_gb=-1.0"),
    ({"ahead": 0}, "data.staging.ahead=0"), ({"copies": 0}, "data.staging.copies=0"),
    ({"pins": Pins("/nowhere", 0.5)}, "pins.scores=/nowhere is no file"),
    ({"pins": Pins(__file__, 1.5)}, "data.staging.pins.share=1.5")])
def test_settings_without_sense_are_problems(folder, staged, changes, words):
    (problem,) = option(folder, shuffle_shards=2, staging=staging(staged, **changes)).problems(CONFIG)
    assert words in problem


def test_staging_wants_windows(folder, staged):
    (problem,) = option(folder, staging=staging(staged)).problems(CONFIG)
    assert "data.shuffle_shards=null mixes all shards at once: set data.shuffle_shards=8" in problem
