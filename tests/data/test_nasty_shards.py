"""A test for each line of the shards that break readers: what is whole is read, what is not is named and counted."""

import os
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from nasty_shards import shards
from tars import flip_on_disk, written

from forge import notes
from forge.data.dropping import Bound, Dropped
from forge.data.fields import Array, Label, Picture, Text
from forge.data.inspection import faults
from forge.data.reading import Reading
from forge.data.samples import open_samples
from forge.data.source import SampleSource, open_source
from forge.data.tokenizer import Bytes
from forge.errors import ConfigError, UnreadableError

GIVEN = Path(os.environ.get("FORGE_NASTY", Path(__file__).parents[3] / "shared" / "nasty"))
SHARDS = cache(shards)
PICTURE = Picture("jpg;jpeg;jpe", True, "apply", "white", 10**7)
LENIENT = Bound(1.0, 0)

# (samples with picture and text, whether `forge.shards check` finds damage)
LINES = {
    "good.tar": (8, False), "trunc_mid_data.tar": (7, True), "trunc_between_parts.tar": (7, True),
    "trunc_in_header.tar": (4, True), "bad_header_mid.tar": (7, True), "no_eof_blocks.tar": (4, False),
    "bitflip_in_jpeg.tar": (8, False), "zero_bytes.tar": (0, True), "empty_valid.tar": (0, False),
    "html_error_page.tar": (0, True), "gzip_named_tar.tar": (0, True), "trailing_garbage.tar": (8, False),
    "concatenated.tar": (16, True), "huge_size_header.tar": (1, True), "one_sample.tar": (1, False),
    "dup_keys/a.tar": (3, False), "dup_keys/b.tar": (3, False), "names/double_ext.tar": (3, False),
    "names/non_ascii.tar": (6, False), "names/latin1_bytes.tar": (1, False), "names/long_gnu.tar": (1, False),
    "names/long_pax.tar": (1, False), "names/macos_junk.tar": (2, False), "names/wds_meta.tar": (2, False),
    "names/upper_ext.tar": (3, False), "names/no_ext.tar": (1, False), "names/links_and_devices.tar": (2, False),
    "names/path_traversal.tar": (2, False), "names/all_incomplete.tar": (0, False), "names/not_grouped.tar": (8, True),
    "names/dup_member.tar": (1, True), "fields/zero_length.tar": (1, False), "fields/odd_text.tar": (9, False),
    **{f"uneven/shard-{number:06}.tar": (count, False) for number, count in enumerate((1, 7, 0, 13, 3))}}
FIELD_OF = {"names/double_ext.tar": "left.jpg"}


@pytest.fixture(autouse=True)
def nothing_said(monkeypatch):
    monkeypatch.setattr(notes, "_said", set())


@pytest.fixture(params=["made", "given"])
def shard(request, tmp_path):
    """The path of a shard that is made here, or given beside this checkout where it lies there."""
    def path(name):
        if request.param == "made":
            return written(tmp_path / "shards" / name, SHARDS()[name])
        found = GIVEN / name if name.split("/")[0] in ("names", "fields") else GIVEN / "shards" / name
        if not found.exists():
            pytest.skip("not among the given shards")
        return found

    return path


def opened(paths, tmp_path, text="txt;caption", bound=LENIENT, others=None, key_dot="first", keep_empty=False,
           invalid="keep"):
    """(source, what was dropped)"""
    others = {} if others is None else others
    dropped = Dropped(paths, bound)
    samples = open_samples({"": paths}, Text(text, keep_empty, invalid), others, key_dot, dropped, tmp_path / "cache")
    reading = Reading(samples.texts.shards, samples.streams, None, None)
    return SampleSource(samples, open_source(samples.texts, Bytes(), tmp_path), others, reading, dropped), dropped


@pytest.mark.parametrize("name", LINES)
def test_what_is_whole_is_read_and_what_is_not_is_told(name, shard, tmp_path, caplog):
    path = shard(name)
    num_samples, damaged = LINES[name]
    picture = Picture(FIELD_OF.get(name, PICTURE.names), True, "apply", "white", 10**7)
    found = [fault for fault in faults(path, tmp_path / "cache") if not fault.harmless]
    assert bool(found) == damaged, found
    if num_samples == 0:
        with pytest.raises((ConfigError, UnreadableError), match="No sample in"):
            opened([path], tmp_path, others={"image": picture})
    else:
        source, dropped = opened([path], tmp_path, others={"image": picture})
        assert len(source) == num_samples
        for index in range(num_samples):
            sample = source[index]
            assert sample["tokens"][-1] == 0 and sample["image"].shape[2] == 3
        assert dropped.counts.total() == 0 or str(path) in dropped.sentence()
    assert not damaged or f"{path}, byte {found[0].offset}" in caplog.text or name in (
        "trunc_between_parts.tar", "names/not_grouped.tar", "names/dup_member.tar")


@pytest.mark.parametrize("name, reasons", [
    ("trunc_mid_data.tar", {"a damaged shard": 1}), ("bad_header_mid.tar", {"a damaged shard": 1,
                                                                          "a missing field jpg;jpeg;jpe": 1}),
    ("trunc_between_parts.tar", {"a missing field txt;caption": 1}),
    ("names/links_and_devices.tar", {"a missing field jpg;jpeg;jpe": 2}),
    ("names/dup_member.tar", {"a field that is there twice": 1}),
    ("fields/zero_length.tar", {"empty picture": 1, "empty text": 2}),
    ("names/no_ext.tar", {}), ("good.tar", {})])
def test_what_is_dropped_is_counted_by_reason_and_shard(name, reasons, shard, tmp_path, caplog):
    _, dropped = opened([shard(name)], tmp_path, others={"image": PICTURE})
    assert dropped.counts == {(reason, 0): count for reason, count in reasons.items()}
    for reason, count in reasons.items():
        assert f"{count} for {reason} ({count} in {shard(name)}, " in caplog.text


@pytest.mark.parametrize("name, words", [
    ("names/links_and_devices.tar", "'000001.jpg' is a hard link, which is not followed"),
    ("names/macos_junk.tar", "4 members are no part of a sample: 4 left by a file manager"),
    ("names/wds_meta.tar", "2 members are no part of a sample: 2 of webdataset itself"),
    ("names/no_ext.tar", "2 members are no part of a sample: 2 without a field in the name"),
    ("names/not_grouped.tar", "8 samples do not lie in one piece"),
    ("no_eof_blocks.tar", "the blocks that end an archive are missing"),
    ("trailing_garbage.tar", "1024 bytes follow the end of the archive"),
    ("html_error_page.tar", "not a tar file, it begins with b'<html>"), ("gzip_named_tar.tar", "this is gzip data"),
    ("huge_size_header.tar", "claims 68719476736 bytes of data")])
def test_what_a_user_should_know_is_said(name, words, shard, tmp_path, caplog):
    try:
        opened([shard(name)], tmp_path)
    except UnreadableError as error:
        assert "Dropped were 1 for a damaged shard" in str(error)
    assert words in caplog.text


def test_many_tiny_samples_cost_no_more_than_their_places(shard, tmp_path):
    source, dropped = opened([shard("many_tiny.tar")], tmp_path, text="txt")
    assert len(source) == 1200 and not dropped.counts
    assert source[0]["tokens"][-1] == 0 and len({bytes(source[index]["tokens"].tolist()) for index in range(1200)}) > 9


def test_the_same_keys_in_two_shards_are_all_read(shard, tmp_path):
    source, _ = opened([shard("dup_keys/a.tar"), shard("dup_keys/b.tar")], tmp_path, others={"image": PICTURE})
    assert len(source) == 6


def test_nothing_of_one_shard_is_glued_to_the_next(tmp_path):
    """a.tar ends in the middle of sample `shared`, b.tar begins with another of that key."""
    first = written(tmp_path / "a.tar", SHARDS()["merge_trap/a.tar"])
    second = written(tmp_path / "b.tar", SHARDS()["merge_trap/b.tar"])
    source, dropped = opened([first, second], tmp_path, others={"image": PICTURE})
    assert len(source) == 3 and dropped.counts["a missing field txt;caption", 0] == 1
    samples = source._samples
    assert samples.texts.shards.tolist() == samples.others["image"].shards.tolist() == [0, 1, 1]


def test_keys_with_dots_are_read_by_a_setting_or_refused_with_it(shard, tmp_path):
    path = shard("names/dots_in_key.tar")
    with pytest.raises(ConfigError, match=rf"No sample in {path} has .*set data.key_dot=last"):
        opened([path], tmp_path, others={"image": PICTURE})
    assert len(opened([path], tmp_path, others={"image": PICTURE}, key_dot="last")[0]) == 3


def test_several_pictures_are_fields_of_one_sample(shard, tmp_path):
    fields = {"left": Picture("left.jpg", True, "apply", "white", 10**7), "seg": PICTURE.__class__(
        "seg.png", True, "apply", "white", 10**7)}
    source, _ = opened([shard("names/double_ext.tar")], tmp_path, others=fields)
    assert len(source) == 3 and set(source[0]) == {"tokens", "left", "seg"}


def test_empty_text_may_be_kept_and_has_its_end(shard, tmp_path):
    source, _ = opened([shard("fields/zero_length.tar")], tmp_path, others={"image": PICTURE}, keep_empty=True)
    assert len(source) == 3 and source.lengths.min() == 1
    assert source[int(np.argmin(source.lengths))]["tokens"].tolist() == [0]


def test_a_byte_order_mark_is_no_part_of_a_text(shard, tmp_path):
    source, _ = opened([shard("fields/odd_text.tar")], tmp_path)
    texts = [bytes(source[index]["tokens"][:-1].tolist()) for index in range(len(source))]
    assert texts[1] == b"UTF-8 with BOM" and b"nul\0inside" in texts and b"a\r\nb\r\nc" in texts


def test_texts_that_are_not_utf8_are_kept_or_dropped_and_counted(shard, tmp_path, caplog):
    path = shard("fields/odd_text.tar")
    assert len(opened([path], tmp_path)[0]) == 9
    assert f"2 texts that are not UTF-8 are kept ({path}); data.invalid_utf8=drop" in caplog.text
    source, dropped = opened([path], tmp_path, invalid="drop")
    assert len(source) == 7 and dropped.counts == {("text that is not UTF-8", 0): 2}


def test_labels_are_digits_inside_their_classes(shard, tmp_path):
    label = Label("cls", True, 10)
    source, dropped = opened([shard("fields/labels_cls.tar")], tmp_path, text="cls", others={"label": label})
    seen = {int(source[index]["label"]) for index in range(len(source))}
    assert seen == {3, 7}
    assert sum(count for (reason, _), count in dropped.counts.items() if "label" in reason) >= 5


def test_nothing_is_unpickled(shard, tmp_path, capfd):
    source, dropped = opened([shard("fields/pickles.tar")], tmp_path, others={"x": Array("npy", False)})
    samples = [source[index] for index in range(4)]
    assert ["x" in sample for sample in samples[:2]] == [False, False]
    assert samples[3]["x"].tolist() == samples[2]["x"].tolist() == [[0, 1, 2], [3, 4, 5]]   # 3 in the place of 2
    assert dropped.counts == {("not an array of numbers", 0): 1}
    assert "UNPICKLED" not in capfd.readouterr().out


def test_a_flipped_bit_in_a_picture_is_dropped_and_another_takes_its_place(tmp_path, caplog):
    path = written(tmp_path / "a.tar", SHARDS()["good.tar"])
    source, dropped = opened([path], tmp_path, others={"image": PICTURE}, bound=Bound(0.0, 1))
    offset = int(source._samples.others["image"].offsets[2])
    flip_on_disk(path, offset + 300)
    assert source[2]["tokens"].tolist() == source[3]["tokens"].tolist()
    assert dropped.counts == {("a change since it was indexed", 0): 1}
    assert f"{path}, byte {offset}: the data here are not what they were" in caplog.text
    flip_on_disk(path, int(source._samples.others["image"].offsets[7]) + 300)
    with pytest.raises(UnreadableError, match=r"2 of \d samples are bad, .*data.bad_floor=1"):
        source[7]


def test_the_bound_holds_when_shards_are_opened(shard, tmp_path):
    path = shard("fields/zero_length.tar")
    with pytest.raises(UnreadableError, match=r"3 of 4 samples are bad.*2 for empty text \(2 in .*first at byte"):
        opened([path], tmp_path, others={"image": PICTURE}, bound=Bound(0.7, 2))
    assert len(opened([path], tmp_path, others={"image": PICTURE}, bound=Bound(0.7, 3))[0]) == 1
    assert len(opened([path], tmp_path, others={"image": PICTURE}, bound=Bound(0.75, 0))[0]) == 1
