"""forge.shards look: a PNG of pictures, plain above and augmented below, with what is wrong said in a sentence."""

import io
import json

import numpy as np
import pytest
from data.tars import tar_bytes, written
from PIL import Image

from forge.data.sheet import _caption
from forge.shards import main

SIDE, GAP = 24, 6
COLORS = [(200, 30, 30), (30, 160, 60), (40, 60, 220)]


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    """Three pictures of one colour each, one of them without a caption, and one that is none."""
    members = {}
    for number, color in enumerate(COLORS):
        file = io.BytesIO()
        Image.new("RGB", (30, 20), color).save(file, "png")
        members[f"{number}.png"] = file.getvalue()
    members = {"0.png": members["0.png"], "0.txt": b"red", "1.png": members["1.png"], "2.png": members["2.png"],
               "2.txt": "blau \u2603".encode(), "3.png": b"no picture", "3.txt": b"x", "4.txt": b"text alone"}
    return written(tmp_path_factory.mktemp("pictures") / "a.tar", tar_bytes(members)).parent


@pytest.fixture
def look(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def run(*words):
        with pytest.raises(SystemExit) as ended:
            main(["look", *map(str, words)])
        said = capsys.readouterr()
        return int(ended.value.code or 0), said.out, said.err

    return run


def cells(path, row, size=SIDE):
    sheet = np.asarray(Image.open(path))
    top = GAP + row * (size + GAP) + (GAP if row else 0)
    return [sheet[top:top + size, left:left + size] for left in (GAP + n * (size + GAP) for n in range(3))]


def test_a_sheet_shows_pictures_as_they_are_and_as_they_are_changed(shards, tmp_path, look):
    out = tmp_path / "new" / "sheet.png"
    code, said, _ = look(shards, out, f"size={SIDE}", "draws=2", "augment.affine.p=0")
    assert code == 0 and "3 pictures" in said
    plain, first, second = (cells(out, row) for row in range(3))
    for number, color in enumerate(COLORS):
        assert (plain[number] == color).all()
        assert all((row[number] == row[number][0, 0]).all() for row in (first, second)), "one colour stays one"
    assert any((first[number] != plain[number]).any() for number in range(3))
    assert any((first[number] != second[number]).any() for number in range(3))
    below = np.asarray(Image.open(out))[GAP + 3 * (SIDE + GAP) + GAP:, :]
    written_on = [(below[:, GAP + n * (SIDE + GAP):][:, :SIDE] < 128).any() for n in range(3)]
    assert written_on == [True, False, True], "captions stand below their pictures"


def test_nothing_is_changed_where_nothing_should_happen(shards, tmp_path, look):
    off = [f"augment.{part}.p=0" for part in ("crop", "flip", "affine", "color")]
    look(shards, tmp_path / "a.png", f"size={SIDE}", "draws=1", *off)
    assert all((changed == plain).all() for plain, changed in zip(cells(tmp_path / "a.png", 0),
                                                                  cells(tmp_path / "a.png", 1), strict=True))


@pytest.mark.parametrize("words, said", [
    (["a.jpg"], "name OUT.png"), (["a.png", "samples=0"], "samples=0: from 1 to 200"),
    (["a.png", "augment.flip.q=1"], "Did you mean 'augment.flip.p'?"),
    (["a.png", "augment.flip.p=3"], "augment.flip.p=3.0: from 0 to 1 is wanted"),
    (["a.png", "augment.crop.scale=[0.5,2]"], "augment.crop.scale=[0.5, 2.0]: [from, to] is wanted"),
    (["a.png", "pictures=bmp"], "pictures=bmp"), (["a.png", "draw=2"], "Did you mean 'draws'?")], ids=str)
def test_what_is_wrong_is_said_and_nothing_written(shards, tmp_path, look, words, said):
    out, *settings = words
    code, _, err = look(shards, tmp_path / out, *settings)
    assert code == 2 and said in err and "Traceback" not in err
    assert not (tmp_path / out).exists()


def test_captions_are_text_or_turns():
    turns = {"messages": [{"role": "user", "content": "what?"}, {"role": "assistant", "content": "a cat"}]}
    assert _caption(json.dumps(turns).encode()) == "what? / a cat"
    for odd in (b"[1]", b"{}", b'{"messages": [1]}', b"\xff", b"[" * 100_000):
        assert _caption(odd) == odd.decode("utf-8", "replace")
