"""Every token of an epoch is predicted once, in rows that depend on nothing but their place."""

import time
from itertools import pairwise

import numpy as np
import pytest
import torch
from documents import Documents

from forge.batch import IGNORED
from forge.batching.fixed import Fixed
from forge.errors import ConfigError

MANY = Documents(7, 1, 30, 2, 2, 64, 1, 1, 9, 100, 5)       # 222 tokens


def rows_of(plan):
    return [row for batch in plan for row in batch]


@pytest.mark.parametrize("length, global_batch", [(1, 1), (3, 2), (8, 4), (8, 27), (50, 4), (221, 1)])
def test_every_token_is_predicted_once(length, global_batch):
    fixed = Fixed(length, False)
    rows = rows_of(fixed.plan(MANY, 0, 0, global_batch))
    windows = 221 // length
    assert len(rows) == windows // global_batch * global_batch
    assert all(piece.start < piece.stop <= MANY.lengths[piece.sample] for row in rows for piece in row)
    tensors = fixed.collate(rows, MANY)
    assert tensors["tokens"].shape == tensors["targets"].shape == (len(rows), length)
    assert tensors["tokens"].dtype == tensors["targets"].dtype == torch.int64
    assert tensors["tokens"].is_contiguous() and tensors["targets"].is_contiguous()
    targets = tensors["targets"].flatten().tolist()
    assert len(set(targets)) == len(targets)
    assert tensors["tokens"][:, 1:].equal(tensors["targets"][:, :-1])


def test_rows_are_windows_of_the_joined_documents():
    """Beside a twin that joins all tokens: sorting windows by place gives back the stream."""
    fixed = Fixed(10, False)
    rows = rows_of(fixed.plan(MANY, 3, 1, 22))
    windows = [torch.cat([MANY[piece.sample]["tokens"][piece.start:piece.stop] for piece in row]).tolist()
               for row in rows]
    following = {window[0]: window for window in windows}
    assert len(following) == 22
    first = (following.keys() - {window[-1] for window in windows}).pop()
    stream = [first]
    while stream[-1] in following:
        stream += following[stream[-1]][1:]
    assert len(stream) == 221
    ends = set((MANY.begins + MANY.lengths - 1).tolist())
    assert all(after == before + 1 or before in ends for before, after in pairwise(stream))


def test_a_plan_is_a_function_of_its_arguments():
    plan = rows_of(Fixed(8, False).plan(MANY, 0, 0, 4))
    assert rows_of(Fixed(8, True).plan(MANY, 0, 0, 4)) == plan
    assert rows_of(Fixed(8, False).plan(MANY, 0, 1, 4)) != plan
    assert rows_of(Fixed(8, False).plan(MANY, 1, 0, 4)) != plan
    state = torch.get_rng_state(), np.random.get_state()[1].copy()
    Fixed(8, False).plan(MANY, 0, 0, 4)
    assert torch.get_rng_state().equal(state[0]) and (np.random.get_state()[1] == state[1]).all()


def test_the_order_is_the_same_for_ever():
    """A run that was begun with an older numpy or forge goes on with the same rows."""
    assert [list(batch) for batch in Fixed(40, False).plan(MANY, 1, 2, 2)] == [
        [((2, 0, 30), (6, 0, 1), (10, 0, 5), (7, 0, 1), (5, 0, 4)), ((9, 47, 88),)],
        [((5, 43, 64), (4, 0, 2), (1, 0, 1), (3, 0, 2), (0, 0, 7), (9, 0, 8)), ((5, 3, 44),)]]


def test_global_batches_are_reached_from_anywhere():
    plan = Fixed(8, False).plan(MANY, 0, 0, 4)
    assert len(plan) == 6
    whole = list(plan[2])
    assert len(plan[2]) == 4 and plan[2][3] == whole[3] and list(plan[2][1::2]) == whole[1::2]
    for index in (-1, 6):
        with pytest.raises(IndexError):
            plan[index]


def test_documents_are_told_apart():
    tensors = Fixed(50, True).collate(rows_of(Fixed(50, True).plan(MANY, 0, 0, 4)), MANY)
    plain = Fixed(50, False).collate(rows_of(Fixed(50, False).plan(MANY, 0, 0, 4)), MANY)
    assert tensors["tokens"].equal(plain["tokens"])
    assert tensors["documents"].dtype == torch.int32 and tensors["positions"].dtype == torch.int64
    document_of = np.repeat(np.arange(len(MANY)), MANY.lengths)
    for row in range(4):
        tokens, targets = plain["tokens"][row].tolist(), plain["targets"][row].tolist()
        number = position = 0
        for at in range(50):
            if at and document_of[tokens[at]] != document_of[tokens[at - 1]]:
                number, position = number + 1, 0
            assert tensors["documents"][row, at] == number and tensors["positions"][row, at] == position
            within = document_of[targets[at]] == document_of[tokens[at]]
            assert tensors["targets"][row, at] == (targets[at] if within else IGNORED)
            position += 1


@pytest.mark.parametrize("lengths, words", [
    ((20, 20), "take 129 tokens and the text has 40: .* lower global_batch to 2 or sequence_length to 4"),
    ((1,), "the text has 1: .* lower global_batch to 1 or sequence_length to 1"), ((), "the text has 0")])
def test_too_little_text_is_a_sentence(lengths, words):
    with pytest.raises(ConfigError, match=f"global_batch=8 rows of sequence_length=16 .*{words}"):
        Fixed(16, False).plan(Documents(*lengths), 0, 0, 8)


def test_planning_an_epoch_of_25_megabytes_is_quick():
    source = Documents(*np.random.default_rng(0).integers(1, 30_000, 1700).tolist())
    started = time.perf_counter()
    plan = Fixed(256, False).plan(source, 0, 0, 32)
    assert len(plan) > 3000 and time.perf_counter() - started < 0.5     # 15 ms on an idle machine
