"""One update: clipped, scaled, skipped where a gradient is not finite; and which weights it may touch."""

import math

import pytest
import torch
from conftest import TINY, composed, train_here
from safetensors.torch import load_file
from tiny import tiny_model
from torch import nn

from forge.build import build_model
from forge.config import load, realise
from forge.hardware import Topology
from forge.optimizer.adamw import AdamW
from forge.optimizer.groups import parameter_groups
from forge.precision import LossScale
from forge.precision.fp32 import FP32
from forge.schedule.constant import Constant

IMPLEMENTATIONS = ["loop", "foreach", "fused"]
LOSS_SCALE = LossScale(init_scale=1024.0, growth_factor=2.0, backoff_factor=0.5, growth_interval=3)


class Scaled(FP32):
    """float32 with a loss scale: what fp16 tells the update, without its rounding."""

    loss_scale = LOSS_SCALE


def built(implementation="loop", precision=None, clip=None, **changes):
    """(model of three weights, 1, 2 and 3, its update)."""
    model = nn.Linear(3, 1, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[1.0, 2.0, 3.0]]))
    settings = {"lr": 0.1, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.0, "max_skipped": 3,
                "groups": []} | changes
    optimizer = AdamW(clip=clip, implementation=implementation, **settings)
    return model, optimizer.build(model, Constant(0), 10, precision or FP32())


def step(model, update, gradient):
    """An update with this gradient, scaled as the loss is."""
    model.weight.grad = torch.tensor([gradient]) * update.scale
    return update()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_the_scale_grows_falls_and_starts_to_count_anew(implementation):
    model, update = built(implementation, Scaled())
    seen = []
    for gradient in (1, 1, 1, 1, 1, math.inf, 1, 1, 1, math.nan, math.inf):
        outcome = step(model, update, [1.0, float(gradient), 1.0])
        seen.append((float(update.scale), bool(outcome.applied), int(outcome.skipped)))
    assert seen == [(1024, True, 0), (1024, True, 0), (2048, True, 0), (2048, True, 0), (2048, True, 0),
                    (1024, False, 1), (1024, True, 0), (1024, True, 0), (2048, True, 0), (1024, False, 1),
                    (512, False, 2)]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("precision", [FP32(), Scaled()], ids=["unscaled", "scaled"])
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_an_update_that_is_not_finite_changes_nothing(bad, precision, implementation):
    model, update = built(implementation, precision, clip=1.0)
    step(model, update, [1.0, 1.0, 1.0])
    def kept():
        state = update.state_dict()
        return {name: state[name].clone() for name in state if "/" in name} | {"weight": model.weight.detach().clone()}

    before = kept()
    assert not step(model, update, [1.0, bad, 1.0]).applied
    after = kept()
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    assert model.weight.grad is None
    assert step(model, update, [1.0, 1.0, 1.0]).applied and not torch.equal(model.weight, before["weight"])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("clip", [None, 1.0, 100.0])
def test_a_scale_that_is_a_power_of_two_changes_no_bit(clip, implementation):
    """Products with powers of two are exact."""
    results = []
    for precision in (FP32(), Scaled()):
        model, update = built(implementation, precision, clip=clip)
        norms = [float(step(model, update, [1.0, 2.0 * number, -3.0]).norm) for number in range(5)]
        results.append((norms, model.weight.tolist()))
    assert results[0] == results[1]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_gradient_longer_than_clip_is_shortened_to_it(implementation):
    """Seen through the first moment, (1 - beta1) * gradient; the weights of AdamW hardly know a gradient's size."""
    for clip, factor in ((1.3, 0.1), (13.0, 1.0), (26.0, 1.0)):
        model, update = built(implementation, clip=clip)
        assert float(step(model, update, [3.0, 4.0, 12.0]).norm) == 13.0
        moment = update.state_dict()["weight/exp_avg"][0].tolist()
        assert moment == pytest.approx([0.1 * factor * part for part in (3, 4, 12)], rel=1e-6), clip


# ---- in a run

def first_and_last(shards, run_dir, *overrides):
    """Weights by name before the first update and after the last, and the optimizer's state after it."""
    run = train_here(run_dir, *shards, "snapshot=inline", *overrides)
    assert run.code == 0, run.err
    model = build_model(load(run_dir), Topology(torch.device("cpu"), 0, 0, 1))
    before = {name: parameter.detach() for name, parameter in model.named_parameters()}
    snapshot, = (run_dir / "snapshots").iterdir()
    saved = load_file(snapshot / "model.safetensors")
    return before, {name: saved[name] for name in before}, load_file(snapshot / "update.safetensors")


def group(match, lr_scale=1.0, weight_decay="null", frozen="false"):
    return f"{{match: '{match}', lr_scale: {lr_scale}, weight_decay: {weight_decay}, frozen: {frozen}}}"


def test_frozen_weights_stay_and_have_no_state(shards, tmp_path):
    before, after, state = first_and_last(
        shards, tmp_path / "run", f"optimizer.groups=[{group('blocks.0.*', frozen='true')}]")
    frozen = {name for name in before if name.startswith("blocks.0.")}
    assert frozen and frozen < before.keys()
    assert {name for name in before if torch.equal(before[name], after[name])} == frozen
    assert {name.rpartition("/")[0] for name in state if "/" in name} == before.keys() - frozen


def test_groups_scale_the_rate_by_name_and_the_first_match_decides(shards, tmp_path):
    """An update of AdamW is the rate times what gradient and weight decay say, so half the rate is half the change."""
    groups = f"optimizer.groups=[{group('blocks.1.attention.*')},{group('blocks.*', lr_scale=0.5)}]"
    plain, half = (first_and_last(shards, tmp_path / name, "stop_at=1", "optimizer.weight_decay=0.5", *words)
                   for name, words in {"plain": [], "half": [groups]}.items())
    for name, first in plain[0].items():
        factor = 0.5 if name.startswith("blocks.") and not name.startswith("blocks.1.attention.") else 1.0
        change, scaled = plain[1][name] - first, half[1][name] - first
        # Both differences are taken from numbers of the weights' size, so they carry its rounding
        torch.testing.assert_close(scaled, factor * change, rtol=1e-5, atol=2 ** -22 * float(first.abs().max()))
        assert change.abs().max() > 0


def test_a_group_sets_weight_decay_and_without_one_vectors_have_none(shards):
    groups = f"optimizer.groups=[{group('head.*', weight_decay=0.0)},{group('*_norm.*', weight_decay=0.5)}]"
    named = {name: (0.0 if name.startswith("head") else 0.5 if "norm" in name else 0.2)
             for name, _ in tiny_model().named_parameters()}
    config = realise(composed(*TINY, *shards, groups, "optimizer.weight_decay=0.2"))
    groups = parameter_groups(tiny_model(), config.optimizer.groups, config.optimizer.weight_decay)
    assert {name: each["weight_decay"] for each in groups for name in each["names"]} == named
    bare = parameter_groups(tiny_model(), [], 0.2)
    assert {name for each in bare if each["weight_decay"] == 0 for name in each["names"]} == {
        name for name in named if "norm" in name}


@pytest.mark.parametrize(("groups", "said"), [
    (group("block.0.*", frozen="true"), "optimizer.groups[0].match='block.0.*' matches no parameter. Names look like"),
    (group("*", frozen="true"), "optimizer.groups freezes every parameter"),
], ids=["no match", "all frozen"])
def test_groups_that_cannot_be_meant_end_the_run_before_it_begins(groups, said, shards, tmp_path):
    run = train_here(tmp_path / "run", *shards, f"optimizer.groups=[{groups}]")
    assert run.code == 2 and run.err.startswith(said)
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_too_many_skipped_updates_in_a_row_end_the_run(shards, tmp_path):
    """A loss scale that float16 cannot hold, and that falls too slowly to reach one that it can."""
    run = train_here(tmp_path / "run", *shards, "precision=fp16", "precision.loss_scale.init_scale=1e30",
                     "optimizer.max_skipped=3")
    assert run.code == 1
    assert "not finite in 4 updates in a row, up to step 4" in run.err and "optimizer.max_skipped=3" in run.err
    assert [(record["applied"], record["skipped"]) for record in run.records] == [(False, n) for n in (1, 2, 3, 4)]


def test_skipped_updates_that_are_not_too_many_are_counted_and_the_run_goes_on(shards, tmp_path):
    run = train_here(tmp_path / "run", *shards, "precision=fp16", "precision.loss_scale.init_scale=1e30",
                     "precision.loss_scale.backoff_factor=1e-9", "optimizer.max_skipped=3")
    assert run.code == 0, run.err
    skipped = [record["skipped"] for record in run.records]
    assert 1 <= max(skipped) <= 3 and skipped[-1] == 0 and run.records[-1]["applied"]
