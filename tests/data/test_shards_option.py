"""data=shards: which files a setting names, and which samples are held out."""

from types import SimpleNamespace

import numpy as np
import pytest
from tars import pairs, tar_bytes, written

from forge.batching.packed import Packed
from forge.data.fields import Array, Label, Picture
from forge.data.shards import Shards, shard_paths
from forge.errors import ConfigError, UnreadableError

CONFIG = SimpleNamespace(model=SimpleNamespace(vocab_size=256))


@pytest.fixture
def folder(tmp_path):
    for number in range(12):
        members = {f"{number}/{name}": data + bytes([65 + number]) for name, data in pairs(10).items()}
        written(tmp_path / "shards" / f"{number:03}.tar", tar_bytes(members))
    return tmp_path / "shards"


def option(folder, **changes):
    settings = {"train": str(folder), "heldout": None, "heldout_fraction": 0.2, "tokenizer": "bytes",
                "text_field": "txt", "pictures": None, "labels": None, "arrays": None, "conversation": None,
                "weights": None, "key_dot": "first",
                "keep_empty": False, "invalid_utf8": "keep", "shuffle_shards": None, "max_bad": 0.05, "bad_floor": 0,
                "staging": None, "cache": str(folder.parent / "cache")}
    return Shards(**settings | changes)


def texts(source):
    return {bytes(source[index]["tokens"].tolist()) for index in range(len(source))}


def test_patterns_name_shards(folder):
    for setting, numbers in ((f"{folder}", range(12)), (f"{folder}/*.tar", range(12)),
                             (f"{folder}/00[0-2].tar", range(3)), (f"{folder}/{{003..005}}.tar", (3, 4, 5)),
                             (f"{folder}/{{001,009}}.tar", (1, 9)), (f"{folder}/004.tar", (4,))):
        assert shard_paths(setting, "data.train") == [folder / f"{number:03}.tar" for number in numbers]


def test_braces_that_do_not_pair_are_part_of_a_name(tmp_path):
    shard = written(tmp_path / "a{1.tar", tar_bytes({}))
    assert shard_paths(str(shard), "data.train") == [shard]


@pytest.mark.parametrize("make, words", [
    (lambda path: None, "does not exist"), (lambda path: path.mkdir(), "holds no .tar files"),
    (lambda path: (path / "train").mkdir(parents=True), r"data.train=.*/train and data.heldout=.*shards/heldout")])
def test_what_names_no_shard_is_a_sentence_and_a_problem(tmp_path, make, words):
    make(tmp_path / "shards")
    settings = option(tmp_path / "shards")
    with pytest.raises(ConfigError, match=f"data.train=.*shards.* {words}" if "=" not in words else words):
        settings.open("train")
    (problem,) = settings.problems(CONFIG)
    assert str(tmp_path / "shards") in problem
    assert "forge.shards make" in problem or "train" in words


def test_no_shards_named_is_a_sentence(folder):
    with pytest.raises(ConfigError, match=r"data\.train names no shards.*python -m forge\.shards make FOLDER OUT"):
        option(folder, train=None).open("train")


def test_a_missing_heldout_is_a_problem_of_its_own(folder):
    (problem,) = option(folder, heldout=f"{folder}/none").problems(CONFIG)
    assert "data.heldout=" in problem and "does not exist" in problem


def test_a_text_that_may_be_many_fields_is_a_problem(folder):
    (problem,) = option(folder, text_field="t*").problems(CONFIG)
    assert problem.startswith("data.text_field=t* may be many fields: name one, or several with ;")


def test_a_fraction_without_sense_is_a_problem(folder):
    (problem,) = option(folder, heldout_fraction=1.0).problems(CONFIG)
    assert "data.heldout_fraction=1.0" in problem


PICTURE, LABEL, ARRAY = Picture("png", True, "apply", "white", 100), Label("cls", True, 10), Array("npy", False)


@pytest.mark.parametrize(("changes", "words"), [
    ({"labels": {"kind": LABEL, "other": LABEL}}, ["data.labels names kind, other,", "set data.labels=null"]),
    ({"arrays": {"x": ARRAY}}, ["data.arrays names x,", "set data.arrays=null"]),
    ({"pictures": {"image": PICTURE}}, ["data.pictures names image,", "set data.pictures=null, or data.conversation"])])
def test_fields_that_reach_no_batch_are_refused_unless_somebody_takes_them(changes, words, folder):
    """Those of a conversation: tests/data/test_pictures_in_batches.py."""
    def problems(batching):
        return list(option(folder, **changes).problems(SimpleNamespace(model=CONFIG.model, batching=batching)))

    (problem,) = problems(Packed(16, 1000))
    assert all(word in problem for word in words)
    assert problems(SimpleNamespace(takes_fields=True)) == []


def test_a_fraction_is_held_out_and_nothing_is_on_both_sides(folder):
    train, heldout = (texts(option(folder).open(split)) for split in ("train", "heldout"))
    assert len(train) + len(heldout) == 120 and not train & heldout
    assert 10 <= len(heldout) <= 40
    assert heldout <= texts(option(folder, heldout_fraction=0.5).open("heldout"))


def test_other_shards_change_no_sample_s_side(folder):
    part = texts(option(folder, train=f"{folder}/00[0-4].tar").open("heldout"))
    assert part and part == texts(option(folder).open("heldout")) & (part | texts(
        option(folder, train=f"{folder}/00[0-4].tar").open("train")))


def test_copies_are_on_one_side(folder, tmp_path):
    members = {f"{number:03}.txt": bytes([97 + number % 26]) * 50 for number in range(520)}
    written(tmp_path / "copies" / "a.tar", tar_bytes(members))
    settings = option(tmp_path / "copies")
    train, heldout = settings.open("train"), settings.open("heldout")
    assert len(train) + len(heldout) == 520 and not texts(train) & texts(heldout) and texts(heldout)


@pytest.mark.parametrize("fraction", [1e-9, 1 - 1e-9])
def test_each_side_has_a_sample(folder, fraction):
    settings = option(folder, heldout_fraction=fraction)
    assert sorted([len(settings.open("train")), len(settings.open("heldout"))]) == [1, 119]


def test_a_single_sample_cannot_be_split(tmp_path):
    written(tmp_path / "one" / "a.tar", tar_bytes({"a.txt": b"text"}))
    with pytest.raises(ConfigError, match="has a single sample, so none can be held out"):
        option(tmp_path / "one").open("train")
    assert len(option(tmp_path / "one", heldout=str(tmp_path / "one")).open("train")) == 1


def test_shards_of_its_own_are_held_out_whole(folder):
    settings = option(folder, train=f"{folder}/00*.tar", heldout=f"{folder}/01*.tar")
    assert len(settings.open("train")) == 100 and len(settings.open("heldout")) == 20
    assert np.array_equal(settings.open("heldout").lengths, settings.open("heldout").lengths)


def test_more_damage_than_is_allowed_ends_the_run(folder):
    shard = folder / "005.tar"
    shard.write_bytes(shard.read_bytes()[:5000])
    with pytest.raises(UnreadableError, match=r"2 of 1[01]\d samples are bad, more than data.max_bad=0.005 and "
                                              r"data.bad_floor=0 allow: .*a damaged shard \(1 in .*005\.tar, byte \d+"):
        option(folder, max_bad=0.005).open("train")
    assert len(option(folder).open("train")) < 120


def test_a_missing_field_names_those_there_are(folder):
    with pytest.raises(ConfigError, match=r"data\.text_field=json; their fields are cls, txt"):
        option(folder, text_field="json").open("train")
