"""Samples listed as columns are those that a plain walk over objects finds, and take little memory."""

import fnmatch
import random
import re
import tracemalloc

import numpy as np
import pytest

from forge.data.dropping import Bound, Dropped
from forge.data.fields import Array, Label, Picture, Text
from forge.data.index import Index, save
from forge.data.listing import listed
from forge.data.naming import key_and_field, samples
from forge.data.samples import open_samples

FIELDS = {"": Text("txt;caption", False, "drop"), "shown": Picture("img.*;jpg", True, "apply", "white", 100),
          "more": Picture("pic.*", False, "apply", "white", 100), "label": Label("cls", True, 10),
          "x": Array("npy;npz", False)}
NAMES = ["txt", "TXT", "caption", "img.10", "img.2", "img.02", "img.png", "jpg", "pic.1", "pic.2", "pic.3", "cls",
         "npy", "npz", "other"]
ODD = ["d/._a.txt", "__meta__/b.txt", "README", "Thumbs.db", "d/.DS_Store", "\u00e9.txt"]


def index_of(path, names, draw):
    count = len(names)
    sizes = np.array([draw.choice([0, *[30] * 20]) for _ in names], np.int64)
    return Index(path, 0, 0, names, np.cumsum(sizes + 1024), sizes,
                 np.array([draw.randrange(2**32) for _ in names], np.uint32),
                 np.array([draw.choice([-1, 0, *[5] * 20]) for _ in names], np.int64),
                 np.array([draw.random() < 0.1 for _ in names]),
                 np.array([draw.choice([(0, 0), (20, 20), *[(9, 9)] * 20]) for _ in names],
                          np.int32).reshape(count, 2), ())


def drawn_names(draw, odd):
    names = []
    for sample in range(draw.randrange(30)):
        key = draw.choice([f"d/{sample}", f"{sample}", "d/0"])
        names += [f"{key}.{field}" for field in draw.sample(NAMES, draw.choice([1, 7, 12, len(NAMES)]))]
    if draw.random() < 0.5:
        draw.shuffle(names)
    return [draw.choice(ODD) if odd and draw.random() < 0.05 else name for name in names]


def refusal(name, size, characters, width, height):
    """Why a member is no such field."""
    if name == "":
        return {-1: "text that is not UTF-8", 0: "empty text"}.get(characters)
    if name == "label":
        return "no label" if characters == 0 else None
    if size == 0:
        return "empty array" if name == "x" else "empty picture"
    if name == "x":
        return None
    return "no picture header" if width == 0 else "too many pixels" if width * height > 100 else None


def members_of(names, found):
    for name in names.split(";"):
        matching = sorted((field for field in found if fnmatch.fnmatchcase(field, name)),
                          key=lambda field: [(not part.isdigit(), int(part) if part.isdigit() else part)
                                             for part in re.split("([0-9]+)", field)])
        if matching:
            return [found[field] for field in matching]
    return []


def judged(index, found, twice):
    """The members of a sample by column; and why it is left out."""
    if twice & set(found.values()):
        return {}, "a field that is there twice"
    columns = {}
    for name, field in FIELDS.items():
        members = members_of(field.names, found)
        if not members and field.required:
            return {}, f"a missing field {field.names}"
        for member in members:
            if why := refusal(name, index.sizes[member], index.characters[member], *index.pictures[member].tolist()):
                return {}, why
        columns |= {f"{name}[{place}]" if "*" in field.names else name: each for place, each in enumerate(members)}
    return columns, None


@pytest.mark.parametrize("odd", [False, True])
@pytest.mark.parametrize("key_dot", ["first", "last"])
def test_the_samples_of_any_shard_are_those_of_a_plain_walk(key_dot, odd, tmp_path):
    draw, num_kept, whys = random.Random(f"{key_dot} {odd}"), 0, set()
    for _ in range(150):
        index = index_of(tmp_path / "a.tar", drawn_names(draw, odd), draw)
        grouping = samples(index.names, key_dot)
        twice = {member for member, _ in grouping.repeated}
        plain = [(found, *judged(index, found, twice)) for _, found in grouping.samples]
        kept = [columns for _, columns, why in plain if why is None]
        left_out = [(why, min(int(index.offsets[member]) for member in found.values()))
                    for found, _, why in plain if why is not None]
        got = listed(index, FIELDS, key_dot)
        assert got.num_samples == len(kept) and got.left_out == left_out
        assert set(got.fields) == {field for found, _, _ in plain for field in found}
        names = {name for columns in kept for name in columns} | {"", "label", "x"}
        assert {name: of.tolist() for name, of in got.columns.items()} == \
            {name: [columns.get(name, -1) for columns in kept] for name in names}
        num_kept, whys = num_kept + len(kept), whys | {why for why, _ in left_out}
    assert num_kept > 200 and len(whys) == 11


def test_names_are_parsed_alike_alone_and_together():
    names = ["a.txt", "b/c.d.JPG", "nothing", "e.f/g.x"]
    for more in ([], ["__x__/a.txt"], ["d/._a.txt"], ["\u00e9.txt"], ["MACOSX.txt"], ["x/__MACOSX/a.txt"],
                 ["THUMBS.DB"], ["d/Desktop.ini"], [".ds_store"]):
        for key_dot in ("first", "last"):
            for name in names + more:
                alone, together = samples([name], key_dot), key_and_field(name, key_dot)
                assert [(key, list(found)) for key, found in alone.samples] == \
                    ([] if together is None else [(together[0], [together[1]])])
            whole = samples(names + more, key_dot)
            parsed = [key_and_field(name, key_dot) for name in names + more]
            assert [key for key, _ in whole.samples] == [parts[0] for parts in parsed if parts]


def test_shards_with_other_columns_are_put_together(tmp_path):
    """What the first shard does not have, the second has, and the other way."""
    names = [["a.txt", "a.img.0", "b.txt", "b.img.0", "b.img.1"], ["c.txt", "c.img.0", "c.npy"], ["d.txt", "d.img.0"]]
    shards = []
    for number, members in enumerate(names):
        shards.append(tmp_path / f"{number}.tar")
        shards[-1].write_bytes(b"")
        status, count = shards[-1].stat(), len(members)
        save(Index(shards[-1], status.st_size, status.st_mtime_ns, members, np.arange(count) + 100 * number,
                   np.full(count, 9), np.arange(count, dtype=np.uint32) + 100 * number, np.full(count, 9),
                   np.arange(count) % 2 == 0, np.full((count, 2), 5, np.int32), ()),
             tmp_path / f"{number}.tar.index")
    fields = {"shown": Picture("img.*", True, "apply", "white", 100), "x": Array("npy", False)}
    dropped = Dropped(shards, Bound(0, 0))
    found = open_samples({"one": shards[:1], "other": shards[1:]}, Text("txt", False, "keep"), fields, "first", dropped,
                         tmp_path)
    assert found.streams.tolist() == [0, 0, 1, 1] and found.numbers.tolist() == [0, 1, 2, 3]
    assert found.texts.offsets.tolist() == [0, 2, 100, 200] and found.texts.shards.tolist() == [0, 0, 1, 2]
    assert found.texts.marks.tolist() == [True] * 4 and found.texts.sizes.tolist() == [6] * 4
    assert found.texts.checksums.tolist() == [0, 2, 100, 200] and list(found.others) == ["shown[0]", "shown[1]", "x"]
    more = found.others["shown[1]"]
    assert more.sizes.tolist() == [-1, 6, -1, -1] and more.sides.tolist() == [[0, 0], [5, 5], [0, 0], [0, 0]]
    assert more.offsets.tolist() == [0, 4, 0, 0] and more.checksums.tolist() == [0, 4, 0, 0]
    assert found.others["x"].sizes.tolist() == [-1, -1, 6, -1]
    for of in (found.texts, *found.others.values()):
        assert [array.dtype for array in (of.shards, of.offsets, of.sizes, of.checksums, of.marks, of.sides)] == \
            [np.int32, np.int64, np.int64, np.uint32, bool, np.int32]


def test_a_sample_takes_little_memory(tmp_path):
    """As millions of them are on every rank."""
    each, num_shards, draw = 500, 60, np.random.default_rng(0)
    shards = []
    for number in range(num_shards):
        shards.append(tmp_path / f"{number:03}.tar")
        shards[-1].write_bytes(b"")
        names = [f"{number:05}{sample:06}.{field}" for sample in range(each) for field in ("jpg", "txt")]
        count, status = len(names), shards[-1].stat()
        save(Index(shards[-1], 0, status.st_mtime_ns, names, np.arange(count) * 1024, np.full(count, 100),
                   draw.integers(0, 2**32, count, np.uint32), np.full(count, 100), np.zeros(count, bool),
                   np.full((count, 2), 64, np.int32), ()), tmp_path / f"{number:03}.tar.index")
    fields = {"image": Picture("jpg", True, "apply", "white", 5000)}
    tracemalloc.start()
    try:
        found = open_samples({"": shards}, Text("txt", False, "keep"), fields, "first", Dropped(shards, Bound(0, 0)),
                             tmp_path)
        kept, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(found) == each * num_shards
    assert kept < 90 * len(found) and peak < 150 * len(found)
