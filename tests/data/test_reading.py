"""Orders of an epoch: exactly once, by windows of shards, and mixed by weight, for any ranks and workers."""

from collections import Counter

import numpy as np
import pytest
from nasty_shards import shards
from tars import pairs, tar_bytes, written
from test_nasty_shards import opened
from test_shards_option import option

from forge.batch import Cursor
from forge.batching.fixed import Fixed
from forge.batching.reading import shuffled_within
from forge.data.reading import Reading
from forge.dataloader.workers import FromWorkers
from forge.feed import Feed

SHARDS_OF = np.repeat(np.arange(10, dtype=np.int32), [1, 7, 0, 13, 3, 20, 5, 9, 2, 30])
ONE = np.zeros(len(SHARDS_OF), np.int32)


@pytest.mark.parametrize("shuffle_shards", [None, 1, 3, 100])
def test_every_sample_comes_once_an_epoch_and_epochs_differ(shuffle_shards):
    reading = Reading(SHARDS_OF, ONE, None, shuffle_shards)
    orders = [reading.order(seed, epoch)[0].tolist() for seed, epoch in ((1, 0), (1, 1), (2, 0))]
    assert all(sorted(order) == list(range(len(SHARDS_OF))) for order in orders)
    assert len({tuple(order) for order in orders}) == 3
    assert orders[0] == reading.order(1, 0)[0].tolist()


@pytest.mark.parametrize("shuffle_shards", [1, 3])
def test_a_window_holds_so_many_shards_and_is_mixed(shuffle_shards):
    samples, blocks = Reading(SHARDS_OF, ONE, None, shuffle_shards).order(0, 0)
    assert (np.diff(blocks) >= 0).all()
    held = [set(SHARDS_OF[samples[blocks == block]].tolist()) for block in np.unique(blocks)]
    assert all(len(each) <= shuffle_shards for each in held) and sum(map(len, held)) == len(set(SHARDS_OF.tolist()))
    longest = samples[blocks == blocks[np.flatnonzero(SHARDS_OF[samples] == 9)[0]]]
    assert (np.diff(longest) < 0).any()


def test_streams_are_mixed_by_weight_and_each_is_used_up_before_it_comes_again():
    streams = (np.arange(len(SHARDS_OF)) % 3 == 0).astype(np.int32)
    reading = Reading(SHARDS_OF, streams, (1.0, 4.0), 2)
    epochs = [reading.order(5, epoch)[0] for epoch in range(6)]
    assert all(len(order) == len(SHARDS_OF) for order in epochs)
    drawn = [Counter(streams[order].tolist()) for order in epochs]
    assert all(each == {0: 18, 1: 72} for each in drawn)
    for half in (epochs[0][:45], epochs[0][45:]):
        assert abs(int((streams[half] == 0).sum()) - 9) <= 1        # mixed evenly, and not one after the other
    for stream in (0, 1):
        members = set(np.flatnonzero(streams == stream).tolist())
        come = [sample for order in epochs for sample in order.tolist() if streams[sample] == stream]
        for first in range(0, len(come) - len(members) + 1, len(members)):
            assert set(come[first:first + len(members)]) == members
    assert all((np.diff(reading.order(5, epoch)[1]) >= 0).all() for epoch in range(3))


def test_windows_of_tokens_stay_in_their_block():
    blocks = np.repeat([0, 2, 5], [4, 6, 3])
    order = shuffled_within(blocks, 0, 0, "windows")
    assert sorted(order.tolist()) == list(range(13)) and (blocks[order] == blocks).all()
    assert order.tolist() != list(range(13))


@pytest.mark.parametrize("shuffle_shards", [None, 2])
def test_uneven_shards_are_read_once_for_any_ranks_and_workers(tmp_path, shuffle_shards):
    """24 samples of 50 tokens and one of a single token: 24 windows of 50 targets, in 2 updates of 12 rows."""
    paths = []
    for name, data in sorted(shards().items()):
        if name.startswith("uneven/"):
            paths.append(written(tmp_path / name, data))
    paths.append(written(tmp_path / "uneven/z.tar", tar_bytes({"last.txt": b""})))
    source, _ = opened(paths, tmp_path, keep_empty=True)
    assert len(source) == 25 and source.lengths.sum() == 24 * 50 + 1
    source.order = Reading(source._samples.texts.shards, source._samples.streams, None, shuffle_shards).order

    def rows(data_rank, data_size, num_workers):
        feed = Feed(source, Fixed(50, False), 3, 12, 12, data_rank, data_size)
        reader = FromWorkers(feed, num_workers, 2, False, False)
        works = iter(reader)
        read = [next(works) for _ in range(4)]
        reader.close()
        assert [work.cursor for work in read] == [Cursor(0, 1), Cursor(1, 0), Cursor(1, 1), Cursor(2, 0)]
        return [[bytes(row.tolist()) for batch in work.batches for row in batch.tensors["targets"]] for work in read]

    whole = rows(0, 1, 0)
    every = Counter(token for index in range(25) for token in source[index]["tokens"].tolist())
    for epoch in (whole[:2], whole[2:]):
        left = every - Counter(b"".join(epoch[0] + epoch[1]))
        assert left.total() == 1            # the first token of all is predicted by nothing
    for data_size, num_workers in ((1, 3), (2, 2), (3, 0), (4, 1)):
        parts = [rows(rank, data_size, num_workers) for rank in range(data_size)]
        for update in range(4):
            assert len({len(part[update]) for part in parts}) == 1
            assert sorted(row for part in parts for row in part[update]) == sorted(whole[update])


def test_the_option_mixes_named_sets(tmp_path):
    for name, count in (("a", 30), ("b", 10)):
        members = {f"{name}{key}": data + name.encode() for key, data in pairs(count).items()}
        written(tmp_path / name / "0.tar", tar_bytes(members))
    train = {"a": str(tmp_path / "a"), "b": str(tmp_path / "b")}
    plain = option(tmp_path / "x", train=train, heldout=train)
    mixed = option(tmp_path / "x", train=train, heldout=train, weights={"a": 1.0, "b": 1.0})
    source = mixed.open("train")
    samples, _ = source.order(0, 0)
    assert Counter((samples >= 30).tolist()) == {False: 20, True: 20}
    assert source.fingerprint != plain.open("train").fingerprint == plain.open("heldout").fingerprint
    assert not list(mixed.problems(SMALL)) and mixed.open("heldout").fingerprint == plain.open("heldout").fingerprint
    (problem,) = option(tmp_path / "x", train=train, weights={"a": 1.0}).problems(SMALL)
    assert "data.weights names a and data.train names a, b" in problem


class SMALL:
    class model:
        vocab_size = 256
