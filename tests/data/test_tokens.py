"""Token files of every kind are read as what they are, and what cannot be right is refused before a model sees it."""

import json
import os
import pickle
import re
import tracemalloc
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import train_here

from forge import notes
from forge.batch import IGNORED
from forge.batching import Piece
from forge.batching.fixed import Fixed
from forge.batching.packed import Packed
from forge.data import token_scan
from forge.data.texts import open_texts
from forge.data.token_format import layout_of
from forge.data.tokens import Tokens
from forge.errors import ConfigError, UnreadableError
from forge.shards import main

DOCUMENTS = [4, 1, 2, 201, 2, 1, 2]         # ends with id 0, but for the last; two are ends alone


def ids_of_documents():
    ids = np.concatenate([np.append(np.arange(1, length), 0) for length in DOCUMENTS])
    ids[-1] = 7
    return ids


@pytest.fixture
def tokens(tmp_path):
    def option(train, **changes):
        settings = {"heldout": str(train), "heldout_fraction": 0.05, "tokenizer": None, "dtype": None, "end": None,
                    "cache": str(tmp_path / "cache")}
        return Tokens(str(train), **settings | changes)

    return option


@pytest.fixture
def said(monkeypatch):
    sentences = []
    monkeypatch.setattr(notes, "_said", set())
    monkeypatch.setattr(notes.logger, "warning", sentences.append)
    return sentences


def problems(option, vocab_size=1000):
    return list(option.problems(SimpleNamespace(model=SimpleNamespace(vocab_size=vocab_size))))


def write(path, ids, dtype="<u2", head=b""):
    path.write_bytes(head + np.asarray(ids).astype(dtype).tobytes())
    return path


def llmc(magic=20240520, version=1, count=100):
    header = np.zeros(256, "<i4")
    header[:3] = magic, version, count
    return header.tobytes()


# ---- what files hold

def test_every_format_gives_its_ids(tokens, tmp_path):
    ids = np.arange(100) * 600
    files = {"llmc.bin": write(tmp_path / "llmc.bin", ids, head=llmc()),
             "llama.bin": write(tmp_path / "llama.bin", ids * 2, "<u4", llmc(20240801, 7)),
             "bare.bin": write(tmp_path / "bare.bin", ids), "wide.bin": write(tmp_path / "wide.bin", ids * 2, "<u4")}
    for kind in ("<u2", ">u4", "<i8"):
        files[kind] = tmp_path / f"{kind[1:]}.npy"
        np.save(files[kind], ids.astype(kind))
    stated = {"bare.bin": "uint16", "wide.bin": "uint32"}
    for name, path in files.items():
        (found,) = [sample["tokens"] for sample in tokens(path, dtype=stated.get(name)).open("train")]
        factor = 2 if name in ("llama.bin", "wide.bin") else 1
        assert found.dtype == torch.int64 and found.tolist() == (ids * factor).tolist(), name


def test_documents_end_with_their_end_and_a_tail_is_one(tokens, tmp_path, said):
    path = write(tmp_path / "documents.bin", ids_of_documents())
    source = tokens(path, dtype="uint16", end=0).open("train")
    assert source.lengths.tolist() == DOCUMENTS and len(source) == 7
    assert torch.cat([source[index]["tokens"] for index in range(7)]).tolist() == ids_of_documents().tolist()
    plan = Packed(64, 10).plan(source, 0, 0, 1)
    tensors = Packed(64, 10).collate([row for batch in plan for row in batch], source)
    assert (tensors["targets"] != IGNORED).sum() == sum(length - 1 for length in DOCUMENTS)
    assert said == ["2 of 7 documents have fewer than two tokens: nothing in them can be predicted, so they are left "
                    "out."]


@pytest.mark.parametrize(("count", "windows"), [(9, 0), (64, 0), (65, 1), (128, 1), (129, 2)])
def test_windows_need_one_token_more_than_they_are_long(count, windows, tokens, tmp_path, said):
    source = tokens(write(tmp_path / "x.bin", range(count)), dtype="uint16").open("train")
    assert said == [f"Nothing says which token ends a document in {tmp_path / 'x.bin'}: the file is one. Set data.end, "
                    f"or data.tokenizer."]
    if not windows:
        with pytest.raises(ConfigError, match=f"take 65 tokens and the text has {count}"):
            Fixed(64, False).plan(source, 0, 0, 1)
        return
    rows = [row for batch in Fixed(64, False).plan(source, 0, 0, 1) for row in batch]
    assert len(rows) == windows
    first = Fixed(64, False).collate([row for row in rows if row[0].start == 0], source)
    assert first["tokens"].tolist() == [list(range(64))] and first["targets"].tolist() == [list(range(1, 65))]


def test_folders_and_patterns_name_files_and_empty_ones_are_counted(tokens, tmp_path, said):
    for name, count in {"b.bin": 0, "a.bin": 5, "c.bin": 7}.items():
        write(tmp_path / name, range(count))
    (tmp_path / "notes.txt").write_text("no ids")
    for train in (tmp_path, tmp_path / "?.bin"):
        assert tokens(train, dtype="uint16").open("train").lengths.tolist() == [5, 7]
        assert f"data.train={train}: 1 of 3 files hold no token." in said
    with pytest.raises(ConfigError, match=r"b.bin: not one token in 1 files: name others; `python -m forge.shards"):
        tokens(tmp_path / "b.bin").open("train")


@pytest.mark.parametrize("block", [1, 3, 50, 1 << 20])
def test_a_scan_in_blocks_is_that_of_a_loop(block, tmp_path, monkeypatch):
    monkeypatch.setattr(token_scan, "_BLOCK", block)
    ids = np.concatenate([ids_of_documents(), [0], ids_of_documents(), [0, 0]])
    path = write(tmp_path / "x.bin", ids)
    scan = token_scan.scanned(layout_of(path, "uint16"), 0, tmp_path / "cache")
    documents, open_ = [], []
    for number in ids.tolist():
        open_.append(number)
        if number == 0:
            documents, open_ = [*documents, tuple(open_)], []
    assert scan.ends.tolist() == np.cumsum([len(each) for each in documents]).tolist()
    assert (scan.largest, scan.at) == (200, int(np.argmax(ids)))
    alike = {each: {int(scan.hashes[index]) for index, other in enumerate(documents) if other == each}
             for each in set(documents)}
    assert all(len(hashes) == 1 for hashes in alike.values())
    assert len(set.union(*alike.values())) == len(alike)
    again = token_scan.scanned(layout_of(path, "uint16"), 0, tmp_path / "cache")
    assert again.ends.tolist() == scan.ends.tolist() and again.hashes.tolist() == scan.hashes.tolist()
    assert (again.largest, again.at, again.checksum) == (scan.largest, scan.at, scan.checksum)


def test_held_out_documents_are_others_and_copies_stay_together(tokens, tmp_path):
    texts = [np.append(np.random.default_rng(seed % 40).integers(1, 50, 9), 0) for seed in range(80)]
    path = write(tmp_path / "x.bin", np.concatenate(texts))
    option = tokens(path, dtype="uint16", end=0, heldout=None, heldout_fraction=0.3)
    train, heldout = ([tuple(source[index]["tokens"].tolist()) for index in range(len(source))]
                      for source in (option.open("train"), option.open("heldout")))
    assert sorted(train + heldout) == sorted(tuple(text.tolist()) for text in texts)
    assert not set(train) & set(heldout) and 4 <= len(heldout) <= 48
    one = tokens(path, dtype="uint16", heldout=None)
    with pytest.raises(ConfigError, match=r"is a single document, so none can be held out: .* set data.end"):
        one.open("heldout")


def test_a_source_is_sent_without_its_bytes_and_tells_contents_apart(tokens, tmp_path):
    path = write(tmp_path / "x.bin", np.tile(np.arange(1, 9), 5000))
    source = tokens(path, dtype="uint16").open("train")
    source[0]
    sent = pickle.dumps(source)
    assert len(sent) < 5000 and pickle.loads(sent)[0]["tokens"].equal(source[0]["tokens"])
    same = tokens(path, dtype="uint16", cache=str(tmp_path / "other")).open("train")
    assert same.fingerprint == source.fingerprint
    assert tokens(path, dtype="uint16", end=8).open("train").fingerprint != source.fingerprint
    other = tokens(write(tmp_path / "y.bin", np.tile(np.arange(2, 10), 5000)), dtype="uint16").open("train")
    assert other.fingerprint != source.fingerprint
    with pytest.raises(IndexError):
        source[1]


# ---- what is refused

@pytest.mark.parametrize(("name", "content", "stated", "words"), [
    ("odd.bin", bytes(101), "uint16", "odd.bin has 101 bytes, which is no whole number of uint16"),
    ("bare.bin", bytes(100), None, "bare.bin is bare numbers, .* set data.dtype=uint16"),
    ("wide.bin", np.arange(70000, 70200, dtype="<u4").tobytes(), "uint16", "its numbers are uint32. Set data.dtype=ui"),
    ("cut.bin", llmc() + bytes(198), None, r"should hold 100 ids of uint16, which is 1,224 bytes, and has 1,222: it w"),
    ("longer.bin", llmc() + bytes(202), None, "1,226: it was cut short, or something was added"),
    ("old.bin", llmc(version=9) + bytes(200), None, "llm.c, and is cut short or of version 9"),
    ("head.bin", llmc()[:300], None, "begins as a file of llm.c, and is cut short"),
    ("says.bin", llmc() + bytes(200), "uint32", "ids are uint16, and data.dtype=uint32: set data.dtype=null"),
    ("cut.npy", b"\x93NUMPY\x01\x00\x76\x00{'descr'", None, "cut.npy has no sound .npy header")])
def test_a_file_that_cannot_be_right_is_refused(name, content, stated, words, tokens, tmp_path):
    (tmp_path / name).write_bytes(content)
    option = tokens(tmp_path / name, dtype=stated)
    with pytest.raises(UnreadableError, match=words):
        option.open("train")
    assert len(problems(option)) == 2 and name in problems(option)[0]


@pytest.mark.parametrize("array", [np.zeros(5), np.zeros((2, 3), int), np.array([None]), np.array([1, -4])], ids=str)
def test_an_array_that_is_no_row_of_ids_is_refused(array, tokens, tmp_path):
    np.save(tmp_path / "x.npy", array, allow_pickle=True)
    with pytest.raises(UnreadableError, match=r"one row of whole numbers is wanted|token 1 is negative"):
        tokens(tmp_path / "x.npy").open("train")


def test_an_npy_file_that_was_cut_is_refused(tokens, tmp_path):
    np.save(tmp_path / "x.npy", np.arange(100, dtype="<u2"))
    os.truncate(tmp_path / "x.npy", 200)
    with pytest.raises(UnreadableError, match=r"should hold 100 ids of uint16, which is 328 bytes, and has 200"):
        tokens(tmp_path / "x.npy").open("train")


def test_an_id_that_the_model_does_not_know_is_named_with_its_place(tokens, tmp_path):
    ids = np.arange(300) % 50
    ids[217] = 65535
    option = tokens(write(tmp_path / "x.bin", ids), dtype="uint16", heldout=None, end=49)
    assert problems(option, 50) == [f"{tmp_path / 'x.bin'} holds the id 65535 (token 217, byte 434) and "
                                    f"model.vocab_size=50: set model.vocab_size=65536 or more, or another data.dtype."]
    assert problems(option, 65536) == []


@pytest.mark.parametrize(("changes", "words"), [
    ({"heldout": None, "heldout_fraction": 1.0}, "data.heldout_fraction=1.0 is no fraction"),
    ({"end": -1}, "data.end=-1: an id is 0 or more"), ({"tokenizer": "none.json"}, "data.tokenizer=none.json"),
    ({"train": None}, "data.train names no files of token ids: set it to a file, a folder or a pattern"),
    ({"train": "nowhere"}, "data.train=nowhere does not exist"), ({"heldout": "no*"}, r"data.heldout=no\* does not"),
    ({"train": "."}, "data.train=. holds no .bin or .npy files")])
def test_settings_that_cannot_be_are_sentences(changes, words, tokens, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = write(tmp_path / "x.bin" if changes.get("train") != "." else tmp_path / "x.ids", range(9))
    option = Tokens(**vars(tokens(path, dtype="uint16")) | changes)
    pytest.importorskip("tokenizers")
    assert any(re.match(words, problem) for problem in problems(option))


def test_a_file_that_changes_while_it_is_read_ends_the_run(tokens, tmp_path):
    """Cut below a map, it would kill the process instead."""
    for name, change in {"cut": lambda path: os.truncate(path, 0), "longer": lambda path: os.truncate(path, 9000),
                         "other": lambda path: (write(path, range(9, 4105)), os.utime(path, (9, 9)))}.items():
        path = write(tmp_path / f"{name}.bin", range(4096))
        source = tokens(path, dtype="uint16").open("train")
        assert len(source[0]["tokens"]) == 4096
        change(path)
        for fresh in (source, pickle.loads(pickle.dumps(source))):
            with pytest.raises(UnreadableError, match=rf"{name}.bin has changed since the run began .* put the old"):
                fresh[0]
        path.unlink()
        with pytest.raises(UnreadableError, match="cannot be read any more"):
            pickle.loads(pickle.dumps(source))[0]


def test_a_file_that_is_replaced_is_read_on_as_it_was(tokens, tmp_path):
    path = write(tmp_path / "x.bin", range(100))
    source = tokens(path, dtype="uint16").open("train")
    source[0]
    os.replace(write(tmp_path / "y.bin", range(50)), path)
    assert source[0]["tokens"].tolist() == list(range(100))


# ---- forge's own

def tokenize(*words):
    with pytest.raises(SystemExit) as ended:
        main(["tokenize", *map(str, words)])
    return ended.value.code or 0


@pytest.fixture
def made(shards, tmp_path, monkeypatch):
    """OUT, made of the shards with bytes as tokens."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = shards[1].removeprefix("data.train=").removesuffix("/train")
    assert tokenize(folder, tmp_path / "out", "tokenizer=bytes") == 0
    return tmp_path / "out"


def test_a_run_on_token_files_is_the_run_on_their_shards(made, shards, tmp_path, capsys):
    assert {path.name for path in made.iterdir()} == {f"{split}.bin{end}" for split in ("train", "heldout")
                                                      for end in ("", ".json")}
    line = ["data=tokens", f"data.train={made}/train.bin", f"data.heldout={made}/heldout.bin", "data.tokenizer=bytes"]
    runs = [train_here(tmp_path / name, *words, "steps=4", "evaluation=heldout", "evaluation.sample=0")
            for name, words in (("shards", [*shards]), ("tokens", line))]
    assert all(run.code == 0 for run in runs), runs[1].err
    assert runs[0].losses == runs[1].losses and runs[0].result["loss_heldout"] == runs[1].result["loss_heldout"]
    stated = json.loads((made / "train.bin.json").read_text())
    tars = sorted(Path(shards[1].removeprefix("data.train=")).glob("*.tar"))
    assert stated["documents"] == len(open_texts(tars, "txt", tmp_path / "cache"))
    assert (stated["dtype"], stated["vocab_size"], stated["end"], stated["tokenizer"]) == ("uint8", 256, 0, "bytes")
    assert stated["tokens"] == (made / "train.bin").stat().st_size


def test_a_tokenizer_file_makes_them_and_another_is_refused(shards, tokens, tmp_path, monkeypatch, capsys):
    library = pytest.importorskip("tokenizers")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name, words in {"one": ["?", "def", "</s>"], "two": ["?", "</s>", "def", "return"]}.items():
        model = library.models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="?")
        each = library.Tokenizer(model)
        each.pre_tokenizer = library.pre_tokenizers.Whitespace()
        each.save(str(tmp_path / f"{name}.json"))
    one, two = tmp_path / "one.json", tmp_path / "two.json"
    train = shards[1].removeprefix("data.train=")
    assert tokenize(train, tmp_path / "out", f"tokenizer={one}") == 0
    assert "data.train=" + str(tmp_path / "out/tokens.bin") in capsys.readouterr().out
    option = tokens(tmp_path / "out/tokens.bin", tokenizer=str(one))
    source = option.open("train")
    assert all(source[index]["tokens"][-1] == 2 for index in range(len(source)))
    assert set(torch.cat([source[index]["tokens"] for index in range(len(source))]).tolist()) == {0, 1, 2}
    assert problems(option, 3) == [] and len(problems(option, 2)) == 3
    (problem, _) = problems(tokens(tmp_path / "out/tokens.bin", tokenizer=str(two)))
    assert "was not made with data.tokenizer=" in problem and "name the tokenizer that made it" in problem
    assert tokenize(train, tmp_path / "out", f"tokenizer={two}") == 2
    assert "is there already" in capsys.readouterr().err
    assert tokenize(train, tmp_path / "out", f"tokenizer={two}", "overwrite=true") == 0
    assert problems(tokens(tmp_path / "out/tokens.bin", tokenizer=str(two))) == []


@pytest.mark.parametrize(("spoil", "words"), [
    (lambda path: os.truncate(path, path.stat().st_size - 1), "it was cut short, or something was added"),
    (lambda path: path.write_bytes(path.read_bytes()[:-2] + b"zz"), "their checksums differ"),
    (lambda path: _restate(path, dtype="uint16"), "it was cut short, or something was added"),
    (lambda path: _restate(path, tokens="many"), "train.bin.json is damaged: make train.bin again"),
    (lambda path: _restate(path, version=2), "no sidecar of forge.tokens version 1"),
    (lambda path: path.with_name("train.bin.json").write_text("[1"), "train.bin.json cannot be read")])
def test_a_sidecar_and_its_file_agree_or_are_refused(spoil, words, made, tokens):
    tokens(made / "train.bin").open("train")
    spoil(made / "train.bin")
    with pytest.raises(UnreadableError, match=words):
        tokens(made / "train.bin").open("train")


def _restate(path, **changes):
    place = path.with_name(path.name + ".json")
    place.write_text(json.dumps(json.loads(place.read_text()) | changes))


@pytest.mark.parametrize(("words", "said"), [
    (["x"], "tokenize wants SHARDS and an OUT, and got: x"), (["x", "y"], "tokenize wants tokenizer=FILE"),
    (["x", "y", "tokeniser=z"], "tokeniser is not a setting of tokenize. Did you mean 'tokenizer'?"),
    (["x", "y", "tokenizer=bytes", "overwrite=1"], "overwrite=1: true or false is wanted")])
def test_a_command_that_cannot_be_is_a_sentence(words, said, capsys):
    assert tokenize(*words) == 2
    assert said in capsys.readouterr().err


def test_a_row_of_a_long_document_costs_no_more_than_the_row(tokens, tmp_path):
    """A file of bare numbers is one document where nothing says what ends one."""
    path = tmp_path / "long.bin"
    np.arange(3_000_000, dtype="<u4").astype("<u2").tofile(path)
    source = tokens(path, dtype="uint16").open("train")
    assert list(source.lengths) == [3_000_000]
    for option in (Fixed(16, False), Packed(16, 1024)):
        row = (Piece(0, 2_000_000, 2_000_017),)
        tracemalloc.start()
        batch = option.collate([row], source)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert batch["tokens"][0].tolist() == [number % (1 << 16) for number in range(2_000_000, 2_000_016)]
        assert batch["targets"][0, -1] == 2_000_016 % (1 << 16) and peak < 1 << 20
