"""The counted loss is exactly that of its twin in plain Python."""

import math
from collections import Counter, defaultdict

import numpy as np
import pytest
import torch

from forge.data import trigram


class Documents:
    """A source of these texts, byte tokens."""

    def __init__(self, *texts: bytes) -> None:
        self.texts = [text + b"\0" for text in texts]
        self.lengths = np.array([len(text) for text in self.texts])
        self.fingerprint = ""

    def __len__(self):
        return len(self.texts)

    def __getitem__(self, index):
        return {"tokens": torch.tensor(list(self.texts[index]))}

    def joined(self) -> bytes:
        return b"".join(self.texts)


def plainly(train: bytes, heldout: bytes) -> float:
    """Witten and Bell's formula, one byte at a time."""
    counts = defaultdict(Counter)
    for at, byte in enumerate(train):
        before = (b"\0\0" + train)[at:at + 2]
        for length in range(3):
            counts[before[2 - length:]][byte] += 1

    def p(byte, before):
        lower = p(byte, before[1:]) if before else 1 / 256
        seen = counts[before]
        return (seen[byte] + len(seen) * lower) / (seen.total() + len(seen)) if seen else lower

    padded = b"\0\0" + heldout
    return -sum(math.log(p(byte, padded[at:at + 2])) for at, byte in enumerate(heldout)) / len(heldout)


TRAIN = Documents(b"the cat sat on the mat", b"", b"the dog", b"that hat", bytes(range(1, 256)))
HELDOUT = Documents(b"the rat sat", b"zzz\xff\xfe", b"a hat")


@pytest.mark.parametrize("at_a_time", [1, 10, 1 << 22])
def test_it_is_its_plain_twin(monkeypatch, at_a_time):
    monkeypatch.setattr(trigram, "_AT_A_TIME", at_a_time)
    assert trigram.heldout_loss(TRAIN, HELDOUT) == pytest.approx(plainly(TRAIN.joined(), HELDOUT.joined()), rel=1e-12)


def test_the_twin_s_probabilities_sum_to_one():
    for before in (b"th", b"\xfd\x01", b"\xfd\xfd"):
        nats = [plainly(TRAIN.joined(), before + bytes([byte])) * 3 for byte in range(256)]
        alone = plainly(TRAIN.joined(), before) * 2
        assert sum(math.exp(alone - each) for each in nats) == pytest.approx(1, rel=1e-9)


def test_a_large_text_is_read_in_part(monkeypatch):
    many = Documents(*[b"abcabc" if number % 2 == 0 else b"xyzxyz" for number in range(20)])
    half = Documents(*[b"abcabc"] * 10)
    monkeypatch.setattr(trigram, "_ENOUGH", 139)
    assert trigram.heldout_loss(many, HELDOUT) == pytest.approx(plainly(half.joined(), HELDOUT.joined()), rel=1e-12)
