"""What a run says about its padding, and what evaluation and other options make of rows that differ."""

from types import SimpleNamespace

import pytest
import torch
from conftest import composed, train_here
from documents import Documents

from forge.attention import Layout
from forge.attention.mask import mask
from forge.batch import IGNORED, Batch
from forge.batching.bucketed import Bucketed
from forge.batching.packed import Packed
from forge.config import check, load, realise
from forge.errors import ConfigError
from forge.hardware import Topology
from forge.model.flops import convention, exact, forward_of
from forge.observe.evaluate import Judge
from forge.observe.seen import Seen
from forge.verify.uneven import Uneven

MANY = Documents(7, 1, 30, 2, 2, 64, 1, 1, 9, 100, 5, 17, 33, 16, 3, 0, 8, 41)
OPTIONS = {"packed": Packed(24, 100), "bucketed": Bucketed(24, [4, 8, 12])}


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("batching", OPTIONS)
def test_padding_and_what_text_may_look_at_are_counted(batching, window):
    option, seen = OPTIONS[batching], Seen(window)
    text = keys = text_keys = places = pairs = 0
    for rows in option.plan(MANY, 0, 0, 4):
        tensors = option.collate(rows, MANY)
        seen(Batch(tensors, 0, 0))
        told = tensors["targets"] != IGNORED
        count, length = told.shape
        allowed = mask(Layout(True, tensors.get("documents"), window, length, torch.device("cpu")))
        allowed = allowed[:, 0].expand(count, -1, -1)
        text, places, pairs = text + int(told.sum()), places + count * length, pairs + count * length**2
        keys, text_keys = keys + int(allowed.sum()), text_keys + int(allowed[told].sum())
    assert (seen.tokens, seen.padding, seen.keys) == (places, places - text, keys)
    assert 0 < seen.padding_share == (places - text) / places < 0.7
    assert seen.keys_of_text == pytest.approx(text_keys / text) and seen.row_length == pytest.approx(pairs / places)


@pytest.mark.parametrize("batching", OPTIONS)
def test_a_run_reports_its_padding_and_counts_operations_of_text_alone(batching, shards, tmp_path):
    edges = ["batching.edges=[8,32]"] if batching == "bucketed" else []
    run = train_here(tmp_path / "run", *shards, f"batching={batching}", *edges, "sequence_length=96", "steps=4",
                     "hardware.peak_tflops=0.5", "evaluation=heldout", "evaluation.batches=1")
    assert run.code == 0, run.err
    config, result = load(run.run_dir), run.result
    source, seen, targets = config.data.open("train"), Seen(None), 0
    for index in range(4):
        rows = config.batching.plan(source, 0, 0, 12)[index]
        for first in range(0, 12, 4):
            tensors = config.batching.collate(rows[first:first + 4], source)
            seen(Batch(tensors, 0, 0))
            targets += int((tensors["targets"] != IGNORED).sum())
    assert result["tokens"] == targets == seen.tokens - seen.padding
    assert 0 < result["padding_share"] == seen.padding_share == run.records[-2]["padding_share"]
    assert f"beside {seen.padding_share:.1%} padding" in (run.run_dir / "report.md").read_text()
    forward = forward_of(config.model)
    second = result["tokens_per_second"] / 0.5e12
    assert result["mfu"] == pytest.approx(convention(forward, seen.row_length) * second)
    assert result["mfu_exact"] == pytest.approx(exact(forward, seen.keys_of_text) * second)
    if batching == "bucketed":
        assert seen.row_length < 96


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("batching", OPTIONS)
def test_evaluation_reads_every_document_in_batches_of_one_kind(batching, size):
    option = OPTIONS[batching]
    plan = option.plan(MANY, 0, 0, 1)
    judges = [Judge(SimpleNamespace(batching=option, seed=0), Topology(torch.device("cpu"), rank, rank, size), MANY,
                    plan, 2) for rank in range(size)]
    shares = [list(judge.batches(None)) for judge in judges]
    assert len({len(share) for share in shares}) == 1
    found = []
    for together in zip(*shares, strict=True):
        assert len({batch.tensors["tokens"].shape[1] for batch in together}) == 1
        assert all(batch.tensors["tokens"].numel() <= 2 * 24 for batch in together)
        for batch in together:
            found += batch.tensors["targets"][batch.tensors["targets"] != IGNORED].tolist()
    firsts = set(MANY.begins[MANY.lengths > 0].tolist())
    assert sorted(found) == sorted(set(range(int(MANY.lengths.sum()))) - firsts)
    assert sum(len(batch.tensors["tokens"]) for batch in judges[0].batches(1)) <= 2 * 6
    some = list(judges[0].batches(1))
    assert 1 <= len(some) <= len(set(plan.kinds))


def test_rows_that_are_made_uneven_are_the_same_however_they_are_cut():
    for option in OPTIONS.values():
        uneven = Uneven(option)
        for rows in uneven.plan(MANY, 0, 0, 4):
            whole = uneven.collate(rows, MANY)["targets"]
            cut = [uneven.collate(rows[first:first + 2], MANY)["targets"] for first in (0, 2)]
            told = [each[each != IGNORED].tolist() for each in (whole, *cut)]
            assert told[0] == told[1] + told[2]


@pytest.mark.parametrize(("words", "sentence"), [
    (["batching=bucketed", "batching.edges=[64,32]"], r"batching.edges=\[64, 32\]: lengths from 1 on"),
    (["batching=bucketed", "batching.edges=[]"], r"batching.edges=\[\]: lengths from 1 on"),
    (["batching=bucketed", "batching.edges=[0,8]"], r"batching.edges=\[0, 8\]: .* each above the one before"),
    (["batching=bucketed", "batching.edges=[8,8]"], r"batching.edges=\[8, 8\]: .* each above the one before"),
    (["batching=bucketed", "+choices.passes=graphed"], "several shapes, and passes=graphed records one: set passes="),
    (["batching=packed", "batching.pool=0"], "batching.pool=0: at least 1 is wanted")])
def test_what_cannot_be_is_a_sentence(words, sentence):
    with pytest.raises(ConfigError, match=sentence):
        check(realise(composed(*words)))
