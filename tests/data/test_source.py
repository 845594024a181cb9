"""Tokens are those that the tokenizer gives, an end after each text, wherever and whenever they are read."""

import pickle

import pytest
import torch
from tars import pairs, tar_bytes, written

from forge.data import source as source_module
from forge.data.source import ByteSource, TokenSource, open_source
from forge.data.texts import open_texts
from forge.data.tokenizer import Bytes, open_tokenizer
from forge.errors import UnreadableError


@pytest.fixture
def texts(tmp_path):
    shards = [written(tmp_path / f"{number}.tar", tar_bytes(pairs(count))) for number, count in enumerate((4, 2))]
    return open_texts(shards, "txt", tmp_path / "cache")


@pytest.fixture
def tokenizer(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"?": 0, "sample": 1, "2": 2, "</s>": 3}, unk_token="?"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    words.save(str(tmp_path / "tokenizer.json"))
    return open_tokenizer(str(tmp_path / "tokenizer.json"))


def test_bytes_are_followed_by_an_end(texts):
    source = open_source(texts, Bytes(), None)
    assert len(source) == 6
    for index in range(6):
        tokens = source[index]["tokens"]
        assert tokens.dtype == torch.int64 and len(tokens) == source.lengths[index]
        assert bytes(tokens.tolist()) == texts[index] + b"\0"
    with pytest.raises(IndexError):
        source[6]


def test_file_tokens_are_followed_by_an_end(texts, tokenizer, tmp_path):
    source = open_source(texts, tokenizer, tmp_path / "cache")
    for index in range(6):
        tokens = source[index]["tokens"]
        assert tokens.dtype == torch.int64 and len(tokens) == source.lengths[index]
        assert tokens.tolist() == [*tokenizer.encode(texts[index].decode()), 3]
    with pytest.raises(IndexError):
        source[-1]


def test_texts_are_tokenised_once(texts, tokenizer, tmp_path, monkeypatch):
    first = TokenSource(texts, tokenizer, tmp_path / "cache")
    monkeypatch.setattr(source_module, "_tokenise", lambda *_: pytest.fail("tokenised again"))
    again = TokenSource(texts, tokenizer, tmp_path / "cache")
    assert again[3]["tokens"].equal(first[3]["tokens"]) and again.fingerprint == first.fingerprint


def test_cut_ids_are_refused(texts, tokenizer, tmp_path):
    TokenSource(texts, tokenizer, tmp_path / "cache")
    (ids,) = (tmp_path / "cache" / "tokens").glob("*/ids.bin")
    ids.write_bytes(ids.read_bytes()[:-4])
    with pytest.raises(UnreadableError, match="is damaged: delete it"):
        TokenSource(texts, tokenizer, tmp_path / "cache")


def test_text_that_is_not_utf8_is_refused_with_its_place(tokenizer, tmp_path):
    shard = written(tmp_path / "bad.tar", tar_bytes({"a.txt": b"fine", "b.txt": b"\xff"}))
    with pytest.raises(UnreadableError, match=r"1 for text that is not UTF-8 \(1 in .*bad\.tar, byte 1536\)"):
        TokenSource(open_texts([shard], "txt", tmp_path), tokenizer, tmp_path / "cache")
    assert not list((tmp_path / "cache" / "tokens").glob("[!.]*"))


def test_fingerprints_tell_texts_and_tokenizers_apart(texts, tokenizer, tmp_path):
    sources = [ByteSource(texts), ByteSource(texts.selected(texts.sizes > 27)),
               TokenSource(texts, tokenizer, tmp_path / "cache")]
    assert len({source.fingerprint for source in sources}) == 3
    assert ByteSource(texts).fingerprint == sources[0].fingerprint


@pytest.mark.parametrize("kind", ["bytes", "file"])
def test_a_source_is_sent_without_what_it_read(texts, kind, request, tmp_path):
    tokenizer = Bytes() if kind == "bytes" else request.getfixturevalue("tokenizer")
    source = open_source(texts, tokenizer, tmp_path / "cache")
    before = len(pickle.dumps(source))
    read = [source[index]["tokens"] for index in range(6)]
    sent = pickle.dumps(source)
    assert len(sent) == before
    assert all(tokens.equal(pickle.loads(sent)[index]["tokens"]) for index, tokens in enumerate(read))


def test_what_is_kept_in_memory_is_bounded(texts, monkeypatch):
    monkeypatch.setattr(source_module, "_KEPT_BYTES", 2000)
    source = ByteSource(texts)
    for index in (0, 1, 2, 3, 4, 5, 3, 0, 2, 2, 1):
        assert bytes(source[index]["tokens"].tolist()) == texts[index] + b"\0"
        assert source._num_kept == sum(map(len, source._kept.values()))
        assert source._num_kept <= 2000 or len(source._kept) == 1
