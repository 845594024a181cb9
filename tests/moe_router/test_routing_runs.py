"""Routing in whole runs: gates that are not finite, experts without tokens, several ranks, bad settings."""

import math
from types import SimpleNamespace

import pytest
import torch
from conftest import TINY, composed, train_apart, train_here
from routings import routing
from safetensors import safe_open

from forge.command_line import CommandLine
from forge.config import realise
from forge.moe_router.limits import idle, problems

LINE = ["snapshot=inline", "model.init_std=0.2", "tracker.every=1"]


def settings(**values):
    return [f"model.routing.{name}={value}" for name, value in values.items()]


def remembered(run, step, name):
    with safe_open(run.run_dir / f"snapshots/step_{step:08d}/model.safetensors", "pt") as file:
        return torch.stack([file.get_tensor(f"blocks.{layer}.feed_forward.{name}") for layer in range(2)])


@pytest.mark.parametrize("more", [{}, {"score": "sigmoid", "normalize": "false", "balance": "bias"},
                                  {"balance": "overflow", "balance_ramp": 0}, {"capacity_factor": 1.0}], ids=str)
def test_a_gate_of_nan_is_named_and_nothing_is_trained(more, shards, tmp_path, monkeypatch):
    import forge.model.network as network

    drawn = network.initialised

    def poisoned(*arguments):
        model = drawn(*arguments)
        with torch.no_grad():
            model.blocks[1].feed_forward.gate.weight[2, 5] = torch.nan
        return model

    monkeypatch.setattr(network, "initialised", poisoned)
    run = train_here(tmp_path / "run", *shards, *LINE, *settings(**more), "optimizer.max_skipped=2", "snapshot.every=1")
    assert run.code != 0
    assert "not finite in 3 updates in a row" in run.err
    assert "Not finite are the weights of blocks.1.feed_forward.gate.weight." in run.err
    assert all(record["loss"] is None and not record["applied"] for record in run.records)
    for name in ("bias", "mean_load", "num_updates"):
        assert not remembered(run, 2, name).any(), name


def test_a_bias_moves_only_with_updates_that_were_applied(shards, tmp_path):
    """Every step by bias_rate against the load of the step, which metrics.jsonl does not hold: so by its size. Scaled
    losses overflow float16 at first, so the first updates are skipped."""
    run = train_here(tmp_path / "run", *shards, *LINE, *settings(balance="bias", bias_rate=0.5), "snapshot.every=1",
                     "snapshot.keep=6", "precision=fp16", "precision.loss_scale.init_scale=1e30",
                     "precision.loss_scale.backoff_factor=1e-9", "optimizer.max_skipped=5")
    applied, before = [record["applied"] for record in run.records if "loss" in record], torch.zeros(2, 4)
    assert len(applied) == 6 and not applied[0] and applied[-1]
    for step, moves in enumerate(applied, 1):
        after = remembered(run, step, "bias")
        assert set((after - before).abs().flatten().tolist()) <= {0.0, 0.5}
        assert torch.equal(after, before) != moves
        before = after


@pytest.mark.dist
@pytest.mark.parametrize("how", [
    {"balance": "bias", "aux_loss": 0},
    {"balance": "overflow", "balance_from": 99, "aux_scope": "global_batch", "aux_loss": 1.0}], ids=str)
def test_two_ranks_remember_what_one_does(how, shards, tmp_path):
    """The same rows on one rank and on two: the load is counted over both, so biases and averages are equal. Two steps,
    whose choices no rounding turns here. With f over the global batch, which a rank alone does not see, the losses."""
    rows = 12 if "aux_scope" in how else 6          # of a micro-batch: one or two passes an update
    line = [*shards, *LINE, *settings(**how), "steps=2", "model.dropout=0"]
    one = train_here(tmp_path / "one", *line, f"micro_batch={rows}")
    two = train_apart(tmp_path / "two", *line, "hardware.processes=2", f"micro_batch={rows // 2}")
    assert two.code == 0, two.err
    for name in ("bias", "mean_load", "num_updates"):
        found, wanted = remembered(two, 2, name), remembered(one, 2, name)
        assert torch.equal(found * (2 if name == "mean_load" else 1), wanted), name
    if how.get("balance") == "overflow":
        assert remembered(one, 2, "mean_load").tolist() == [rows * 32 * 2 / 4] * 2
    for mine, theirs in zip(two.records, one.records, strict=True):
        for figure in ("loss", "gradient_norm", "expert_load_max_over_mean"):
            assert mine[figure] == pytest.approx(theirs[figure], rel=1e-5), figure
        if "aux_scope" in how:
            assert mine["aux_loss"] == pytest.approx(theirs["aux_loss"], rel=1e-5)


@pytest.mark.dist
def test_an_expert_without_tokens_hangs_no_rank(shards, tmp_path):
    """32 experts, of which a rank's micro-batch of 8 tokens reaches 16 at most: most have none on one rank or both."""
    line = [*shards, *LINE, *settings(num_experts=32), "sequence_length=8", "global_batch=4", "steps=2"]
    run = train_apart(tmp_path / "two", *line, "hardware.processes=2", "micro_batch=1")
    assert run.code == 0, run.err
    assert all(record["applied"] and math.isfinite(record["gradient_norm"]) for record in run.records)
    one = train_here(tmp_path / "one", *line, "micro_batch=1")
    assert [record["loss"] for record in run.records] == pytest.approx([record["loss"] for record in one.records],
                                                                       rel=1e-5)


@pytest.mark.parametrize(("settings", "said"), [
    ({"top_k": 5}, "top_k=5 does not fit model.routing.num_experts=4"), ({"top_k": 0}, "top_k=0 does not fit"),
    ({"num_groups": 3}, "num_groups=3 does not divide model.routing.num_experts=4"),
    ({"num_groups": 0}, "num_groups=0 does not divide"),
    ({"num_groups": 2, "top_groups": 3}, "top_groups=3 does not fit model.routing.num_groups=2"),
    ({"top_groups": 0}, "top_groups=0 does not fit"),
    ({"num_groups": 4, "top_groups": 1}, "top_groups=1 groups of 1 experts are fewer experts than model.routing.top_k"),
    ({"threshold": 1.0}, "threshold=1.0: more than 1 is wanted"), ({"threshold": math.nan}, "threshold=nan"),
    ({"load_decay": 1.0}, "load_decay=1.0: 0 (no memory) to below 1"), ({"load_decay": -0.1}, "load_decay=-0.1"),
    ({"bias_rate": -1.0}, "bias_rate=-1.0: 0 or more"), ({"bias_rate": math.nan}, "bias_rate=nan"),
    ({"jitter": 1.0}, "jitter=1.0: 0 (none) to below 1"), ({"jitter": -0.1}, "jitter=-0.1"),
    ({"scale": 0.0}, "scale=0.0: more than 0"), ({"scale": math.inf}, "scale=inf"),
    ({"shared_hidden": -1}, "shared_hidden=-1: 0 or more"), ({"balance_from": -1}, "balance_from=-1"),
    ({"balance_ramp": -1}, "balance_ramp=-1"), ({"aux_loss": -1.0}, "aux_loss=-1.0"),
    ({"z_loss": math.nan}, "z_loss=nan"),
    ({"capacity_factor": 0.0}, "capacity_factor=0.0: more than 0"),
    ({"capacity_factor": 1.5, "balance": "overflow"}, "capacity_factor=1.5 drops what model.routing.balance=overflow"),
], ids=str)
def test_settings_that_cannot_be(settings, said):
    (problem,) = problems(routing(**settings))
    assert problem.startswith("model.routing.") and said in problem


@pytest.mark.parametrize("settings", [{}, {"threshold": None}, {"threshold": math.inf},
                                      {"num_groups": 2, "top_groups": 1}, {"balance_ramp": 0},
                                      {"capacity_factor": 1.0, "balance": "bias"}], ids=str)
def test_settings_that_can_be(settings):
    assert list(problems(routing(**settings))) == []


def test_the_model_says_them(shards, tmp_path):
    from forge.errors import ConfigError

    with pytest.raises(ConfigError, match="num_groups=3 does not divide"):
        train_here(tmp_path / "run", *shards, *settings(num_groups=3))


@pytest.mark.parametrize(("settings", "named"), [
    ({"aux_loss": 0.1}, {"bias_rate", "threshold", "load_decay", "balance_from", "balance_ramp"}),
    ({"aux_loss": 0.1, "balance": "bias"}, {"threshold", "load_decay", "balance_from", "balance_ramp"}),
    ({"aux_loss": 0.1, "balance": "overflow"}, {"bias_rate"}),
    ({"balance": "overflow", "threshold": None},
     {"bias_rate", "load_decay", "balance_from", "balance_ramp", "aux_scope"})],
    ids=["none", "bias", "overflow", "threshold of infinity"])
def test_settings_that_do_nothing(settings, named):
    assert idle(routing(**settings)).keys() == named


def test_a_setting_that_does_nothing_is_said(capsys):
    """Of those that were asked for, and no other."""
    words = settings(threshold=3.0, aux_scope="batch")
    CommandLine.note_unused(SimpleNamespace(overrides=words), realise(composed(*TINY, *words, "run_dir=x")))
    assert capsys.readouterr().err == (
        "forge: model.routing.threshold=3.0 has no effect without model.routing.balance=overflow.\n")
