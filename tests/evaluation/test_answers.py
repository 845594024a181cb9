"""Which documents are answered exactly, by a model of which that is known, in rows of every kind, at any ranks."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import train_here
from documents import Documents
from ranks import at_ranks
from tiny import tiny_batch, tiny_model
from torch import nn

from forge.batch import IGNORED
from forge.batching.bucketed import Bucketed
from forge.batching.fixed import Fixed
from forge.batching.packed import Packed
from forge.evaluation.answers import Answers, AnswersObserver
from forge.hardware import Topology
from forge.observe.answers import Numbered, answered
from forge.observe.evaluate import Judge
from forge.precision.fp32 import FP32

LENGTHS = (9, 5, 1, 14, 2, 3, 21, 8, 6, 12)         # 81 tokens: windows of 16 leave none out
ALL_WRONG, LAST_WRONG, FIRST_WRONG = 1, 6, 9        # document 6 is longer than a row
RIGHT = np.array([0, 3, 4, 5, 7, 8])
JUDGED = np.array([0, 1, 3, 4, 5, 6, 7, 8, 9])      # a single token follows nothing
BATCHINGS = {"fixed": Fixed(16, True), "packed": Packed(16, 1000), "one a pool": Packed(16, 1),
             "bucketed": Bucketed(16, [4, 8]), "one bucket": Bucketed(16, [16])}


class NextNumber(nn.Module):
    """Says that the next number follows each, but behind some; sure of itself, so that the loss counts its misses."""

    def __init__(self, wrong):
        super().__init__()
        self.wrong = torch.tensor(sorted(wrong))

    def hidden_states(self, batch):
        return batch.tensors["tokens"].unsqueeze(-1)

    def logits_of(self, hidden):
        tokens = hidden.squeeze(-1)
        said = torch.where(torch.isin(tokens, self.wrong), 0, tokens + 1)
        return 50.0 * F.one_hot(said, sum(LENGTHS) + 1).float()

    def forward(self, batch, scale):
        logits = self.logits_of(self.hidden_states(batch))
        loss_sum = F.cross_entropy(logits.flatten(0, 1), batch.tensors["targets"].flatten(),
                                   ignore_index=IGNORED, reduction="sum")
        return loss_sum * scale, loss_sum, {}


def judge_of(batching, rank=0, world=1, rows=2, source=None):
    source = source or Documents(*LENGTHS)
    config = SimpleNamespace(batching=batching, seed=0, precision=FP32())
    return Judge(config, Topology(torch.device("cpu"), rank, rank, world), source,
                 batching.plan(source, 0, epoch=0, global_batch=1), rows)


def model_of(source):
    begin, size = source.begins, source.lengths
    wrong = {*range(begin[ALL_WRONG], begin[ALL_WRONG] + size[ALL_WRONG]), begin[FIRST_WRONG],
             begin[LAST_WRONG] + size[LAST_WRONG] - 2}
    return NextNumber(wrong)


def found_by(name, rank=0, world=1, batches=None):
    judge = judge_of(BATCHINGS[name], rank, world)
    return answered(judge, model_of(judge.source), batches)


def found_here(name):
    """On a rank of a group."""
    import torch.distributed as dist

    found = found_by(name, dist.get_rank(), dist.get_world_size())
    return found.right, found.judged, found.loss


@pytest.mark.parametrize("name", BATCHINGS)
def test_just_those_that_it_gets_right_are_right(name):
    found = found_by(name)
    assert np.flatnonzero(found.judged).tolist() == JUDGED.tolist()
    assert np.flatnonzero(found.right).tolist() == RIGHT.tolist()
    assert found.exact == len(RIGHT) / len(JUDGED)


@pytest.mark.parametrize("name", BATCHINGS)
def test_the_loss_is_that_of_heldout(name):
    judge = judge_of(BATCHINGS[name])
    loss, _ = judge.mean_loss(model_of(judge.source), None)
    assert answered(judge, model_of(judge.source), None).loss == pytest.approx(loss, rel=1e-6)
    num_wrong, num_targets = LENGTHS[ALL_WRONG] - 1 + 2, sum(LENGTHS) - len(LENGTHS)
    assert loss == pytest.approx(50 * num_wrong / num_targets, rel=1e-5)


@pytest.mark.dist
@pytest.mark.parametrize("world", [2, 3])
def test_ranks_find_together_what_one_finds(world):
    """"bucketed" has batches of two kinds, and fewer rows of one than ranks."""
    for name in ("packed", "bucketed"):
        alone = found_by(name)
        for right, judged, loss in at_ranks(world, found_here, name):
            assert (right == alone.right).all() and (judged == alone.judged).all()
            assert loss == pytest.approx(alone.loss, rel=1e-6)      # sums of float32 in another order


@pytest.mark.parametrize("at_once", [1, 3, 1000])
def test_each_batch_passes_once_and_a_few_of_its_targets_meet_the_head_at_a_time(at_once, monkeypatch):
    judge, passes, rows = judge_of(BATCHINGS["packed"], rows=3), [], []

    class Counting(NextNumber):
        def hidden_states(self, batch):
            passes.append(batch.num_targets)
            return super().hidden_states(batch)

        def logits_of(self, hidden):
            rows.append(len(hidden))
            return super().logits_of(hidden)

    monkeypatch.setattr("forge.observe.evaluate._AT_ONCE", at_once)
    found = answered(judge, Counting(model_of(judge.source).wrong.tolist()), None)
    assert np.flatnonzero(found.right).tolist() == RIGHT.tolist()
    assert passes == [batch.num_targets for batch in judge.batches(None)]
    assert max(rows) <= at_once and sum(rows) == sum(passes) < judge.rows * 16 * len(passes)


def test_a_network_says_of_each_target_what_its_logits_say(monkeypatch):
    """2e-6: float32 rows computed beside other rows."""
    network, batch = tiny_model(), tiny_batch()
    batch.tensors["targets"][:, ::3] = IGNORED
    monkeypatch.setattr("forge.observe.evaluate._AT_ONCE", 7)
    targets = batch.tensors["targets"]
    with torch.no_grad():
        nats, missed = judge_of(BATCHINGS["packed"]).by_target(network, batch)
        logits, kept = network.logits(batch), targets != IGNORED
    torch.testing.assert_close(nats.float(), F.cross_entropy(logits[kept], targets[kept], reduction="none"),
                               rtol=2e-6, atol=2e-6)
    assert (missed == (logits.argmax(-1) != targets)[kept]).all() and len(missed) == kept.sum()


def test_a_bound_judges_the_first_rows_only():
    found = found_by("one a pool", batches=1)       # two rows of one part each
    assert found.judged.sum() in (1, 2) and (found.right <= found.judged).all()


def test_kinds_are_told_apart():
    found = found_by("packed")
    kinds = np.array(["even" if number % 2 == 0 else "odd" for number in range(len(LENGTHS))])
    assert found.exact_by(kinds) == {"even": 3 / 4, "odd": 3 / 5}    # document 2 is judged nowhere


def test_numbers_of_samples_are_like_no_token():
    source = Numbered(Documents(3, 2))
    assert source[1]["tokens"].tolist() == [source[0]["tokens"][0] + 1] * 2
    assert source[0]["tokens"].min() > 2**32


def test_figures_name_kinds_where_the_source_knows_them(monkeypatch):
    judge = judge_of(Packed(16, 1000))
    observer = AnswersObserver.__new__(AnswersObserver)
    observer.judge, observer.batches, observer.run = judge, 100, SimpleNamespace(model=model_of(judge.source))
    assert observer.figures().keys() == {"loss_heldout", "exact"}
    judge.source.kinds = np.array(["a"] * 3 + ["b"] * 7)
    figures = observer.figures()
    assert figures["exact_a"] == 1 / 2 and figures["exact_b"] == 5 / 7 and figures["exact"] == 6 / 9


def test_a_run_says_how_many_it_answers(shards, tmp_path, capsys):
    words = [*shards, "batching=packed", "attention=eager", "evaluation=answers"]
    run = train_here(tmp_path / "answers", *words, "evaluation.every=3")
    assert run.code == 0, run.err
    assert [record["step"] for record in run.records if "exact" in record] == [3, 6]
    assert run.result["exact"] == 0.0               # six updates teach no file by heart
    said = "Answered exactly: 0.0% of the held-out samples."
    assert said in capsys.readouterr().out and said in (run.run_dir / "report.md").read_text()
    plain = train_here(tmp_path / "heldout", *words[:-1], "evaluation=heldout", "evaluation.batches=64",
                       "evaluation.sample=0")
    assert run.result["loss_heldout"] == pytest.approx(plain.result["loss_heldout"], rel=1e-6)


def test_settings_without_sense_are_problems():
    assert list(Answers(0, 1).problems(None)) == []
    assert "evaluation.batches=0" in " ".join(Answers(0, 0).problems(None))
    assert "evaluation.every=-1" in " ".join(Answers(-1, 1).problems(None))
