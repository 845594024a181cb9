"""What bucketed and packed promise alike: each document once an epoch, wherever it is read, and how much is padding."""

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from documents import Documents

from forge import notes
from forge.batch import IGNORED, Cursor
from forge.batching import Piece
from forge.batching.bucketed import Bucketed
from forge.batching.packed import Packed, best_fit
from forge.dataloader.webdataset import Workers
from forge.errors import ConfigError
from forge.feed import Feed
from forge.hardware import Topology

# Two log-normals, cut at 1024, which 10 % reach: mean 307, median 147. In places: one token less than a document has.
SKEWED = json.loads((Path(__file__).parent / "lengths_2000.json").read_text())
MANY = Documents(7, 1, 30, 2, 2, 64, 1, 1, 9, 100, 5, 17, 33, 16, 3, 0, 8, 41)
OPTIONS = [Bucketed(16, [2, 6, 8, 12]), Bucketed(16, [64]), Packed(16, 1000), Packed(16, 3), Packed(5, 1)]
STEPS_OF_64 = list(range(64, 1025, 64))


def rows_of(plan):
    return [row for batch in plan for row in batch]


def places(row):
    return sum(piece.stop - piece.start - 1 for piece in row)


def feed(batching, source=MANY, **changes):
    settings = {"source": source, "batching": batching, "seed": 0, "global_batch": 6, "micro_batch": 1,
                "data_rank": 0, "data_size": 1}
    return Feed(**settings | changes)


def tokens_of(batches):
    """(token, target) of everything that is predicted, with how often."""
    pairs = Counter()
    for batch in batches:
        told = batch.tensors["targets"] != IGNORED
        pairs.update(zip(batch.tensors["tokens"][told].tolist(), batch.tensors["targets"][told].tolist(), strict=True))
    return pairs


# ---- padding

@pytest.mark.parametrize(("edges", "most"), [([64, 128, 256, 512, 1024], 0.21), (STEPS_OF_64, 0.09)])
@pytest.mark.parametrize("global_batch", [8, 32])
def test_padding_to_edges(edges, most, global_batch):
    """The rows that fill up the last updates of a bucket are counted apart: fewer than one update of each bucket."""
    option = Bucketed(1024, edges)
    text = padded = empty = 0
    for batch in option.plan(Documents(*[size + 1 for size in SKEWED]), 0, 0, global_batch):
        documents = [piece for row in batch for piece in row]
        edge = option.edge_of(max(places([piece]) for piece in documents))
        text += places(documents)
        padded += edge * len(documents)
        empty += edge * (global_batch * (1024 // edge) - len(documents))
    assert text == sum(SKEWED)
    assert 1 - text / padded <= most
    assert empty < len(edges) * global_batch * 1024


@pytest.mark.parametrize("pool", [256, 1024])
def test_padding_in_packed_rows(pool):
    plan = Packed(1024, pool).plan(Documents(*[size + 1 for size in SKEWED]), 0, 0, 32)
    text = sum(map(places, rows_of(plan)))
    assert text == sum(SKEWED) and 1 - text / (len(plan) * 32 * 1024) <= 0.015


def test_the_tightest_row_is_found_as_by_looking_at_all():
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        sizes = torch.randint(1, 33, (60,), generator=generator).numpy()
        rows: list[list[int]] = []
        for index in sorted(range(60), key=lambda index: -sizes[index]):
            fitting = [row for row in rows if sizes[row].sum() + sizes[index] <= 32]
            fullest = max((sizes[row].sum() for row in fitting), default=0)
            if not fitting:
                rows.append([index])
            else:
                next(row for row in fitting if sizes[row].sum() == fullest).append(index)
        found = best_fit(sizes, 32)
        assert sorted(index for row in found for index in row) == list(range(60))
        assert Counter(int(sizes[row].sum()) for row in found) == Counter(int(sizes[row].sum()) for row in rows)


def test_each_length_has_one_bucket():
    lengths = [1, 2, 63, 64, 65, 127, 128, 129, 255, 256, 257, 511, 512, 513, 1023, 1024]
    edges = [64, 64, 64, 64, 128, 128, 128, 256, 256, 256, 512, 512, 512, 1024, 1024, 1024]
    assert [Bucketed(1024, [64, 128, 256, 512, 1024]).edge_of(length) for length in lengths] == edges
    assert Bucketed(200, [64, 128, 256]).used == [64, 128, 200] and Bucketed(64, [64, 128]).used == [64]


# ---- every document once, wherever it is read

@pytest.mark.parametrize("option", OPTIONS, ids=str)
@pytest.mark.parametrize("global_batch", [1, 5, 64])
def test_each_token_but_the_first_is_predicted_once_from_the_one_before_it(option, global_batch):
    for epoch in (0, 1):
        plan = option.plan(MANY, 3, epoch, global_batch)
        assert {len(batch) for batch in plan} == {global_batch} and all(any(batch) for batch in plan)
        tensors = [option.collate(batch, MANY) for batch in plan]
        wanted = {(begin + place, begin + place + 1): 1 for begin, length in zip(MANY.begins, MANY.lengths, strict=True)
                  for place in range(length - 1)}
        found = Counter()
        for each in tensors:
            told = each["targets"] != IGNORED
            assert told.sum(1).equal(each["lengths"])       # a place is padding, or it predicts
            assert (each["tokens"][~told] == 0).all()
            found.update(zip(each["tokens"][told].tolist(), each["targets"][told].tolist(), strict=True))
        assert found == wanted


def test_a_document_of_a_row_and_one_token_is_one_window():
    """The first token of the next row would be a row too many, and the last one a token too few."""
    for option in (Bucketed(64, [64]), Packed(64, 10)):
        assert rows_of(option.plan(Documents(65), 0, 0, 1)) == [((0, 0, 65),)]
        assert sorted(rows_of(option.plan(Documents(66), 0, 0, 1))) in ([((0, 0, 65),), ((0, 64, 66),)],)
        assert rows_of(option.plan(Documents(64), 0, 0, 1)) == [((0, 0, 64),)]


@pytest.mark.parametrize("option", OPTIONS, ids=str)
@pytest.mark.parametrize(("size", "micro"), [(1, 6), (2, 1), (2, 3), (3, 2), (6, 1)])
def test_any_number_of_ranks_reads_the_same_updates_in_passes_of_one_size(option, size, micro):
    alone = feed(option)
    for index in range(len(alone.plan(0))):
        whole = alone[Cursor(0, index)]
        shares = [feed(option, data_rank=rank, data_size=size, micro_batch=micro)[Cursor(0, index)]
                  for rank in range(size)]
        assert sum((tokens_of(share.batches) for share in shares), Counter()) == tokens_of(whole.batches)
        assert {len(share.batches) for share in shares} == {6 // size // micro}
        assert {share.cursor for share in shares} == {whole.cursor}
        passes = [batch for share in shares for batch in share.batches]
        assert all(batch.tensors["tokens"].numel() <= micro * option.sequence_length for batch in passes)
        assert len({batch.tensors["tokens"].shape for batch in passes if batch.num_targets}) == 1
        held = [sum(bool(row) for row in alone.plan(0)[index][rank::size]) for rank in range(size)]
        assert max(held) - min(held) <= 1


@pytest.mark.parametrize("option", [OPTIONS[0], OPTIONS[3]], ids=str)
def test_reading_goes_on_anywhere_with_other_workers_and_ranks(option):
    """Six updates by one rank in its own process; then the same from each position on, over an epoch's end, by two
    ranks with two workers each."""
    def reader(rank, size, workers, start):
        topology = Topology(torch.device("cpu"), rank, rank, size)
        made = Workers(workers, 0.5, 2, True, False).build(
            feed(option, data_rank=rank, data_size=size, micro_batch=3), topology)
        made.seek(start)
        return made

    def read(size, workers, start, count):
        readers = [reader(rank, size, workers, start) for rank in range(size)]
        works = [[work for work, _ in zip(one, range(count), strict=False)] for one in readers]
        for one in readers:
            one.close()
        return [(sum((tokens_of(work.batches) for work in together), Counter()), together[0].cursor)
                for together in zip(*works, strict=True)]

    last = len(feed(option).plan(0)) - 1
    whole = read(1, 0, Cursor(0, last - 1), 4)
    assert [cursor for _, cursor in whole] == [Cursor(0, last), Cursor(1, 0), Cursor(1, 1), Cursor(1, 2)]
    for begun in (0, 2):
        start = Cursor(0, last - 1) if begun == 0 else whole[begun - 1][1]
        assert read(2, 2, start, 4 - begun) == whole[begun:]


# ---- plans

def test_plans_are_functions_of_their_arguments():
    for option in OPTIONS:
        plan = rows_of(option.plan(MANY, 0, 0, 4))
        assert rows_of(option.plan(MANY, 0, 0, 4)) == plan
        assert rows_of(option.plan(MANY, 0, 1, 4)) != plan and rows_of(option.plan(MANY, 1, 0, 4)) != plan
        sliced = option.plan(MANY, 0, 0, 4)[1]
        assert list(sliced[1::2]) == list(sliced)[1::2] and sliced[3] == list(sliced)[3]
        for index in (-1, len(plan)):
            with pytest.raises(IndexError):
                option.plan(MANY, 0, 0, 4)[index]


def test_the_order_is_the_same_for_ever():
    """A run that was begun with an older numpy or forge goes on with the same rows."""
    few = Documents(4, 9, 20, 2, 6, 3, 3, 12)
    assert [list(batch) for batch in Packed(10, 5).plan(few, 1, 2, 2)] == PACKED
    assert [list(batch) for batch in Bucketed(10, [3, 5]).plan(few, 1, 2, 2)] == BUCKETED


PACKED = [[((1, 0, 9), (5, 0, 3)), ((2, 0, 11),)], [((6, 0, 3),), ((2, 10, 20),)],
          [((7, 0, 11),), ((4, 0, 6), (0, 0, 4), (3, 0, 2), (7, 10, 12))]]
BUCKETED = [[((4, 0, 6),), ()], [((2, 10, 20),), ((7, 0, 11),)], [((2, 0, 11),), ((1, 0, 9),)],
            [((0, 0, 4), (3, 0, 2), (7, 10, 12)), ((5, 0, 3), (6, 0, 3))]]


class InWindows(Documents):
    """240 documents in shuffle windows of 60. An epoch has documents 200 to 219 twice, and those from 220 on never."""

    def __init__(self):
        super().__init__(*[3 + index * 7 % 30 for index in range(240)])

    def order(self, seed, epoch):
        samples = np.arange(240)
        samples[220:] -= 20
        mixed = np.random.default_rng((seed, epoch)).permutation(240)
        mixed = mixed[np.argsort(samples[mixed] // 60, kind="stable")]
        return samples[mixed], samples[mixed] // 60


@pytest.mark.parametrize("option", [Packed(16, 5), Bucketed(16, [4, 8])])
def test_the_order_of_a_source_is_kept(option):
    """What a source repeats and leaves out is read so often; and few shards are wanted at a time."""
    source = InWindows()
    pieces = [piece for row in rows_of(option.plan(source, 0, 0, 2)) for piece in row]
    assert Counter(piece.sample for piece in pieces if piece.start == 0) == Counter(source.order(0, 0)[0].tolist())
    windows = np.array([piece.sample // 60 for piece in pieces])
    misplaced = windows != np.sort(windows)
    assert misplaced.mean() < 0.1, "those of a row, pool or update that reaches over the edge of a window"


class Shorter(Documents):
    """Sample 1 could not be read, and a shorter one takes its place."""

    def __getitem__(self, index):
        tokens = super().__getitem__(index)["tokens"]
        return {"tokens": tokens[:4] if index == 1 else tokens}


def test_a_shorter_sample_moves_no_other():
    rows = [(Piece(0, 0, 5), Piece(1, 0, 9), Piece(2, 0, 4))]
    whole, short = (Packed(16, 8).collate(rows, source(5, 9, 4)) for source in (Documents, Shorter))
    assert torch.equal(whole["tokens"][0, 12:], short["tokens"][0, 12:])
    assert torch.equal(whole["targets"][0, 12:], short["targets"][0, 12:])
    assert torch.equal(whole["documents"], short["documents"])
    assert (short["targets"][0, 7:12] == IGNORED).all() and (short["targets"][0, 4:7] != IGNORED).all()


def test_updates_are_of_like_size():
    """Not full ones and a last one that is nearly empty: its gradient would be of a few documents."""
    plan = Packed(16, 1000).plan(Documents(*[17] * 9), 0, 0, 8)
    assert [sum(map(bool, batch)) for batch in plan] == [5, 4]
    plan = Bucketed(16, [8]).plan(Documents(*[17] * 9, *[5] * 17), 0, 0, 8)
    assert sorted(sum(map(len, batch)) for batch in plan) == [4, 5, 8, 9]


def test_nothing_to_predict_is_a_sentence_and_little_is_counted(monkeypatch):
    sentences = []
    monkeypatch.setattr(notes, "_said", set())
    monkeypatch.setattr(notes.logger, "warning", sentences.append)
    for option in (Bucketed(16, [8]), Packed(16, 4)):
        for source in (Documents(), Documents(1, 0, 1)):
            with pytest.raises(ConfigError, match=rf"None of the {len(source)} documents .* set batching=fixed"):
                option.plan(source, 0, 0, 2)
        assert len(option.plan(Documents(1, 2, 0, 3), 0, 0, 2)) >= 1
    assert sentences == ["2 of 4 documents have fewer than two tokens: nothing in them can be predicted, so they are "
                         "left out."]


# ---- tensors

def test_packed_rows_tell_documents_apart():
    rows = [(Piece(2, 0, 5), Piece(0, 3, 7)), ()]
    tensors = Packed(9, 4).collate(rows, MANY)
    first = int(MANY.begins[2])
    assert tensors["tokens"].tolist() == [[first, first + 1, first + 2, first + 3, 3, 4, 5, 0, 0], [0] * 9]
    assert tensors["targets"].tolist() == [[first + 1, first + 2, first + 3, first + 4, 4, 5, 6, IGNORED, IGNORED],
                                           [IGNORED] * 9]
    assert tensors["documents"].tolist() == [[0] * 4 + [1] * 3 + [2] * 2, [0] * 9]
    assert tensors["positions"].tolist() == [[0, 1, 2, 3, 0, 1, 2, 0, 1], list(range(9))]
    assert tensors["lengths"].tolist() == [7, 0]
    assert {name: tensor.dtype for name, tensor in tensors.items()} == {
        "tokens": torch.int64, "targets": torch.int64, "documents": torch.int32, "positions": torch.int64,
        "lengths": torch.int64}


def test_bucketed_rows_need_no_mask():
    tensors = Bucketed(9, [4]).collate([(Piece(2, 0, 5), Piece(0, 3, 6)), (), (Piece(2, 6, 8),)], MANY)
    assert tensors.keys() == {"tokens", "targets", "lengths"}
    assert tensors["targets"].shape == (6, 4) and tensors["lengths"].tolist() == [4, 2, 0, 0, 1, 0]
    assert tensors["targets"][1].tolist() == [4, 5, IGNORED, IGNORED]
    assert Bucketed(9, [4]).collate([(), ()], MANY)["targets"].eq(IGNORED).all()
