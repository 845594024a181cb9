"""The same texts give the same bytes, every text is found again, and webdataset reads what is packed."""

import numpy as np
import pytest
import webdataset

from forge.data.index import load
from forge.data.pack import chosen, pack, rank, refusal
from forge.data.texts import open_texts

TEXTS = [("b/a.txt", b"one"), ("b/a_txt", b"two"), ("b/a.txt~", b"three"), ("__pkg__/__init__.py", b"four"),
         ("__meta__.txt", b"five"), (".hidden", b"six"), ("x" * 150 + "/" + "y" * 150 + ".txt", b"seven"),
         ("caf\u00e9.txt", b"eight"), (b"caf\xe9.txt".decode("utf-8", "surrogateescape"), b"nine"),
         ("d.d/e", b"t\xc3\xa9n")]


def test_every_text_is_found_again_by_forge_and_by_webdataset(tmp_path):
    shards = pack(TEXTS, tmp_path / "out", 1 << 20)
    texts = open_texts(shards, "txt", tmp_path)
    assert [texts[index] for index in range(len(texts))] == [text for _, text in TEXTS]
    dataset = list(webdataset.WebDataset([str(shard) for shard in shards], shardshuffle=False))
    assert [sample["txt"] for sample in dataset] == [text for _, text in TEXTS]
    assert len({sample["__key__"] for sample in dataset}) == len(TEXTS)


def test_the_same_texts_give_the_same_bytes(tmp_path):
    first, second = (pack(TEXTS, tmp_path / name, 12) for name in "ab")
    assert len(first) > 2 and [shard.name for shard in first] == [shard.name for shard in second]
    assert [shard.read_bytes() for shard in first] == [shard.read_bytes() for shard in second]


def test_a_shard_is_closed_once_it_is_full(tmp_path):
    shards = pack([(str(number), b"x" * 100) for number in range(25)], tmp_path, 1000)
    assert [len(load(shard.with_name(shard.name + ".index"), shard).names) for shard in shards] == [10, 10, 5]


def test_nothing_to_pack_makes_no_shard(tmp_path):
    assert pack([], tmp_path, 1000) == [] and not list(tmp_path.iterdir())


@pytest.mark.parametrize("text, why", [(b"", "empty"), (b"a\0b", "zero bytes"), ("a".encode("utf-16"), "zero bytes"),
                                       (b"\xff", "not UTF-8"), ("\u00e9".encode("latin-1"), "not UTF-8")])
def test_what_is_no_text_is_refused_with_its_reason(text, why):
    assert why in refusal(text)


def test_text_is_not_refused():
    assert refusal("\u00e9 \U0001F600\r\n".encode()) is None


def test_a_name_alone_decides_what_is_held_out():
    names = [f"{number}.txt" for number in range(20000)]
    held = [name for name in names if chosen(name, 0.05)]
    assert abs(len(held) / len(names) - 0.05) < 0.005
    assert set(held) < {name for name in names if chosen(name, 0.1)}
    assert [rank("a"), rank("json/decoder.py")] == pytest.approx([0.26258956, 0.45080147], abs=1e-8)  # for ever
    assert np.std([rank(name) for name in names]) == pytest.approx(12 ** -0.5, rel=0.02)
