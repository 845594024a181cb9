"""Options that promise the same numbers keep the promise, through whole runs: six updates, three micro-batches each.

Two promises (docs/design.md). The same bits: loss, gradient norm, weights and optimizer state are compared exactly,
with dropout. Within rounding: without dropout, whose draws belong to a kernel and to a micro-batch.

How much rounding: the loss of an update is a float32 sum over its targets, whose rounding errors add up like a random
walk: sqrt(targets) * eps / 2 of it. AdamW divides a gradient by its size, so an error e in a gradient g moves its
weight by about lr * e / g, and the loss by lr * e: an update adds about as much error as a forward pass makes. So loss
and gradient norm of update n agree to n * sqrt(targets) * eps / 2, if no token's experts are a tie within rounding.
"""

import json
import math

import pytest
import torch
from conftest import TINY, Finished, forge, train_here
from planted import plant, train_planted
from tiny import ROUTING, one_pass, tiny_batch, tiny_model

from forge.batch import IGNORED, Batch

EPS = torch.finfo(torch.float32).eps
ROWS, LENGTH = 12, 40
# Weights large enough that attention and experts matter to the loss from the first update on, and heads whose scale
# is no power of two, so that rounding differs.
LINE = ["model.init_std=0.2", "model.head_width=24", f"sequence_length={LENGTH}", f"global_batch={ROWS}",
        "micro_batch=4", "snapshot=inline"]


def rounding(update: int) -> float:
    return update * math.sqrt(ROWS * LENGTH) * EPS / 2


@pytest.fixture(scope="module")
def trained(shards, tmp_path_factory):
    """A run of these words, trained once however many tests ask for it."""
    runs = {}

    def train(*words: str):
        if words not in runs:
            runs[words] = train_here(tmp_path_factory.mktemp("run") / "run", *shards, *LINE, *words)
            assert runs[words].code == 0, runs[words].err
            assert list(runs[words].losses) == [1, 2, 3, 4, 5, 6]
        return runs[words]

    return train


def figures(run) -> list[tuple[float, float]]:
    return [(record["loss"], record["gradient_norm"]) for record in run.records]


def weights_and_moments(run) -> dict[str, str]:
    """Checksums of the files that hold them after the last update."""
    files = json.loads((run.run_dir / "snapshots/step_00000006/manifest.json").read_text())["files"]
    return {name: files[f"{name}.safetensors"]["sha256"] for name in ("model", "update")}


def same_bits(run, plain):
    assert figures(run) == figures(plain)
    assert weights_and_moments(run) == weights_and_moments(plain)


def same_within_rounding(run, plain):
    for update, (found, wanted) in enumerate(zip(figures(run), figures(plain), strict=True), 1):
        assert found == pytest.approx(wanted, rel=rounding(update), abs=0), update


WORKERS = ("dataloader=webdataset", "dataloader.prefetch_factor=2")


@pytest.mark.parametrize("words", [
    ("overlap=prefetch",),
    ("overlap=prefetch", "overlap.depth=4"),
    ("hardware.garbage=frozen",),
    ("checkpointing=full",),
    ("checkpointing=selective",),
    ("checkpointing=selective", "checkpointing.save=[]"),
    ("checkpointing=selective", "checkpointing.save=[attention]"),
    ("checkpointing=selective", "checkpointing.every=2"),
    (*WORKERS, "dataloader.workers=1"),
    (*WORKERS, "dataloader.workers=2"),
    (*WORKERS, "dataloader.workers=2", "dataloader.persistent=false", "overlap=prefetch", "checkpointing=full"),
], ids=" ".join)
def test_the_same_bits(words, trained):
    same_bits(trained("model.dropout=0.1", *words), trained("model.dropout=0.1"))


PLAIN = ("model.dropout=0", "attention=eager", "moe_router=loop", "optimizer.implementation=loop")


@pytest.mark.parametrize("words", [
    ("attention=sdpa",), ("attention=flash",), ("attention=cudnn",), ("attention=flex",),
    ("moe_router=sorted",), ("moe_router=fused",),
    ("operators=handwritten",),
    ("loss=chunked", "loss.chunk_tokens=7"), ("loss=inplace",), ("passes=graphed",),
    ("optimizer.implementation=foreach",), ("optimizer.implementation=fused",),
    ("optimizer.implementation=triton",),
    ("micro_batch=12",), ("micro_batch=2",), ("micro_batch=1",),
], ids=" ".join)
def test_the_same_within_rounding(words, trained):
    same_within_rounding(trained(*PLAIN, *words), trained(*PLAIN))


@pytest.mark.parametrize("mistake", ["model.rotary.base=9900.0", "model.eps=1.1e-5", "model.routing.aux_loss=0.0101",
                                     "optimizer.weight_decay=0.105"])
def test_the_tolerance_sees_a_small_mistake(mistake, trained):
    with pytest.raises(AssertionError):
        same_within_rounding(trained(*PLAIN, mistake), trained(*PLAIN))


@pytest.mark.dist
@pytest.mark.slow
def test_buckets_change_no_bit_and_a_second_rank_only_rounding(shards, tmp_path):
    line = [*shards, *LINE, "model.hidden=1024", "micro_batch=2", "model.dropout=0"]
    alone = train_here(tmp_path / "alone", *line)
    assert (alone.run_dir / "snapshots/step_00000006/model.safetensors").stat().st_size > 3 * 2**20, "several buckets"
    done = forge("train", "-m", *TINY, *line, "hardware.processes=2", "comm.bucket_cap_mb=1,25",
                 f"run_dir={tmp_path}/sweep")
    assert done.returncode == 0, done.stderr
    small, large = (Finished(0, "", "", tmp_path / "sweep" / name) for name in "01")
    same_bits(small, large)
    same_within_rounding(small, alone)


# ---- accumulation with unequal numbers of targets

UNEVEN = """
from dataclasses import dataclass
import torch
from forge.batch import IGNORED
from forge.batching.fixed import Fixed

@dataclass(frozen=True)
class Option(Fixed):
    '''Of a row, as many of the first targets as its tokens decide are not predicted: all of them in some rows.'''

    def collate(self, rows, source):
        tensors = super().collate(rows, source)
        halves = tensors["tokens"].sum(1, keepdim=True) % 3
        length = tensors["tokens"].shape[1]
        hidden = torch.arange(length) < halves * length // 2
        return tensors | {"targets": tensors["targets"].masked_fill(hidden, IGNORED)}
"""


def test_accumulating_unequal_numbers_of_targets_is_one_large_batch(shards, tmp_path):
    allowed = plant(tmp_path / "outside", "batching", "uneven", UNEVEN, sequence_length="${sequence_length}",
                    mask_documents="false")
    whole, *cut = (train_planted(tmp_path / f"run_{rows}", tmp_path / "outside", allowed, *shards, *LINE,
                                 "batching=uneven", "model.dropout=0", f"micro_batch={rows}") for rows in (12, 4, 1))
    counts = [record["targets"] for record in whole.records]
    assert len(set(counts)) > 1 and max(counts) < ROWS * LENGTH
    for run in cut:
        assert run.code == 0, run.err
        assert [record["targets"] for record in run.records] == counts
        same_within_rounding(run, whole)


@pytest.mark.parametrize("rows", [[1, 5, 2], [4, 4], [1] * 8])
def test_gradients_of_micro_batches_add_up_to_those_of_the_batch(rows):
    """In float64, whose rounding (1e-16 times some thousand terms) leaves no room for any other weighting."""
    model = tiny_model(routing=ROUTING).double()
    batch = tiny_batch(rows=8)
    tokens, targets = batch.tensors["tokens"], batch.tensors["targets"]
    for row, hidden in enumerate((0, 3, 17, 9, 0, 1, 16, 5)):       # row 2 has no target at all
        targets[row, :hidden] = IGNORED
    total = int((targets != IGNORED).sum())
    wanted = one_pass(model, Batch({"tokens": tokens, "targets": targets}, total, 0))
    model.zero_grad()
    for some_tokens, some_targets in zip(tokens.split(rows), targets.split(rows), strict=True):
        count = int((some_targets != IGNORED).sum())
        scaled, _, _ = model(Batch({"tokens": some_tokens, "targets": some_targets}, count, 0), torch.tensor(1 / total))
        scaled.backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, wanted[name], rtol=1e-11, atol=1e-13, msg=name)
