"""Texts are read by the rules of webdataset, and never with a byte that was not indexed."""

import os
import pickle

import numpy as np
import pytest
import webdataset
from tars import flip_on_disk, pairs, tar_bytes, written
from webdataset.tariterators import base_plus_ext

from forge.data.naming import key_and_field, samples
from forge.data.texts import open_texts
from forge.errors import ConfigError, UnreadableError


@pytest.fixture
def shards(tmp_path):
    return [written(tmp_path / f"{number}.tar", tar_bytes(pairs(count))) for number, count in enumerate((3, 0, 1, 5))]


@pytest.fixture
def texts(shards, tmp_path):
    return open_texts(shards, "txt", tmp_path)


def from_webdataset(shards, field):
    dataset = webdataset.WebDataset([str(shard) for shard in shards], shardshuffle=False, empty_check=False)
    return [sample[field] for sample in dataset if field in sample]


@pytest.mark.parametrize("field", ["txt", "cls"])
def test_texts_are_those_that_webdataset_reads(shards, tmp_path, field):
    texts = open_texts(shards, field, tmp_path)
    assert [texts[index] for index in range(len(texts))] == from_webdataset(shards, field)
    assert texts.sizes.tolist() == [len(text) for text in from_webdataset(shards, field)]


@pytest.mark.parametrize("name", ["a.txt", "a/b.c/d.e.txt", "./x.TXT", "/abs/../x.txt", "no_ending", ".hidden",
                                  "a/b", "dir.d/", "two\nlines.txt"])
def test_names_are_taken_apart_as_webdataset_does(name):
    key, field = base_plus_ext(name)
    if name == "two\nlines.txt":        # the library's pattern does not cross a line's end, and so loses the sample
        key, field = "two\nlines", "txt"
    assert key_and_field(name) == (None if key is None else (key, field.lower()))


@pytest.mark.parametrize("name", ["__meta__", "__meta__/a.txt"])
def test_what_webdataset_keeps_for_itself_is_no_sample(name):
    assert key_and_field(name) is None


def test_a_sample_is_a_run_of_one_key():
    grouping = samples(["a.txt", "a.cls", "b.txt", "a.txt", "a.txt", "junk"])
    assert grouping.samples == [("a", {"txt": 0, "cls": 1}), ("b", {"txt": 2}), ("a", {"txt": 4})]
    assert [member for member, _ in grouping.repeated] == [4] and [member for member, _ in grouping.scattered] == [3]


def test_the_parts_of_a_sample_that_lie_apart_are_put_together():
    grouping = samples(["a.jpg", "b.jpg", "a.txt", "b.txt"])
    assert grouping.samples == [("a", {"jpg": 0, "txt": 2}), ("b", {"jpg": 1, "txt": 3})]
    assert [member for member, _ in grouping.scattered] == [2, 3] and not grouping.repeated


@pytest.mark.parametrize("name, parts", [
    ("img.v1.2.jpg", ("img.v1.2", "jpg")), ("a/b.c/track 2.0 (clean).TXT", ("a/b.c/track 2.0 (clean)", "txt")),
    ("a.txt", ("a", "txt")), ("no_ending", None), (".hidden", None), ("a.b/c", None), ("__meta__/a.txt", None)])
def test_a_key_may_end_at_the_last_dot(name, parts):
    assert key_and_field(name, "last") == parts


@pytest.mark.parametrize("name", ["._000000.jpg", "a/._b.txt", ".DS_Store", "a/.DS_Store", "__MACOSX/._0.txt",
                                  "a/__MACOSX/b.txt", "Thumbs.db", "a/Desktop.ini"])
def test_what_file_managers_leave_is_no_sample(name):
    assert key_and_field(name) is None and key_and_field(name, "last") is None
    assert samples([name, "a.txt"]).passed == {"left by a file manager": 1}


def test_the_same_keys_in_two_shards_are_two_samples(shards, tmp_path):
    assert len(open_texts([shards[0], shards[3]], "txt", tmp_path)) == 8


def test_a_field_twice_in_a_sample_is_refused(tmp_path):
    data = tar_bytes({"a.txt": b"1", "b.txt": b"3"})
    shard = written(tmp_path / "a.tar", tar_bytes({"a.txt": b"0"})[:1024] + data)
    with pytest.raises(UnreadableError, match=r"1 of 2 samples are bad.*a field that is there twice \(1 in .*a\.tar"):
        open_texts([shard], "txt", tmp_path)


def test_a_flipped_bit_is_found_when_it_is_read(texts, shards):
    flip_on_disk(shards[3], int(texts.offsets[-2]) + 7)
    assert texts[len(texts) - 1] and texts[0]
    with pytest.raises(UnreadableError, match=rf"3\.tar, byte {texts.offsets[-2]}: the data here are not what"):
        texts[len(texts) - 2]


def test_a_shard_that_was_cut_while_it_was_read_is_found(texts, shards):
    os.truncate(shards[3], int(texts.offsets[-1]) + 3)
    with pytest.raises(UnreadableError, match=r"3\.tar, byte"):
        texts[len(texts) - 1]


def test_a_shard_that_is_gone_is_a_sentence(texts, shards):
    shards[0].unlink()
    with pytest.raises(UnreadableError, match=r"Cannot read .*0\.tar, byte"):
        texts[0]


def test_a_field_that_nothing_has_is_named_beside_those_there_are(shards, tmp_path):
    with pytest.raises(ConfigError, match=r"data\.text_field=text; their fields are cls, txt"):
        open_texts(shards, "text", tmp_path)
    with pytest.raises(ConfigError, match="they hold no samples"):
        open_texts([shards[1]], "txt", tmp_path)


def test_the_fingerprint_is_of_content_and_order_alone(texts, shards, tmp_path):
    moved = [written(tmp_path / "moved" / shard.name, shard.read_bytes()) for shard in shards]
    assert open_texts(moved, "txt", tmp_path).fingerprint == texts.fingerprint
    assert open_texts(moved[::-1], "txt", tmp_path).fingerprint != texts.fingerprint
    chosen = np.arange(len(texts)) != 4
    assert texts.selected(chosen).fingerprint != texts.fingerprint
    assert [texts.selected(chosen)[4], len(texts.selected(chosen))] == [texts[5], len(texts) - 1]


def test_places_are_sent_and_not_texts(texts):
    sent = pickle.dumps(texts)
    assert len(sent) < 3500 and pickle.loads(sent)[2] == texts[2]


def test_many_shards_do_not_hold_many_files_open(tmp_path):
    shards = [written(tmp_path / f"{number}.tar", tar_bytes(pairs(1))) for number in range(150)]
    texts = open_texts(shards, "txt", tmp_path)
    before = len(os.listdir("/proc/self/fd"))
    for index in range(150):
        assert texts[index] == texts[0]
    assert len(os.listdir("/proc/self/fd")) <= before + 64
