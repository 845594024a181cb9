"""optimizer=lars and optimizer=muon: what an update is, by the formula in float64; what survives a snapshot; that it
learns; and that it skips, unscales and clips as AdamW does."""

import math

import pytest
import torch
from conftest import composed, train_here
from safetensors.torch import load_file
from tiny import ROUTING, one_pass, tiny_batch, tiny_model
from torch import nn

from forge.config import check, realise
from forge.errors import ConfigError
from forge.optimizer import Group
from forge.optimizer.lars import LARS
from forge.optimizer.muon import ByAdamW, Muon
from forge.optimizer.orthogonal import orthogonal
from forge.precision import LossScale
from forge.precision.bf16_master import BF16Master
from forge.precision.fp32 import FP32
from forge.schedule.constant import Constant

BOTH = ["lars", "muon"]
MATCH = ["embedding.*", "head.*", "*.gate.*"]
EPS = torch.finfo(torch.float32).eps


class Scaled(FP32):
    """float32 with a loss scale: what fp16 tells the update, without its rounding."""

    loss_scale = LossScale(init_scale=1024.0, growth_factor=2.0, backoff_factor=0.5, growth_interval=100)


def option(name, **changes):
    if name == "lars":
        return LARS(**{"lr": 0.5, "trust": 0.02, "momentum": 0.9, "weight_decay": 0.1, "clip": None, "max_skipped": 3,
                       "groups": []} | changes)
    return Muon(**{"lr": 0.03, "momentum": 0.9, "nesterov": True, "iterations": 5, "adjust_lr": "original",
                   "products": "float32", "weight_decay": 0.1, "clip": None, "max_skipped": 3,
                   "adamw": ByAdamW(MATCH, 0.001, 0.9, 0.95, 1e-8), "groups": []} | changes)


def trained(model, chosen, gradients, precision=None):
    """(the update after one step a set of gradients, what its outcomes were)."""
    update = chosen.build(model, Constant(0), 10, precision or FP32())
    outcomes = []
    for each in gradients:
        for (name, weight), scale in zip(model.named_parameters(), [update.scale] * len(each), strict=True):
            weight.grad = each[name] * scale
        outcomes.append(update())
    return update, outcomes


def some_gradients(model, number, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [{name: 0.01 * torch.randn(weight.shape, generator=generator) for name, weight in model.named_parameters()}
            for _ in range(number)]


def moe():
    return tiny_model(layers=1, routing=ROUTING)


# ---- the formulas, written out once more, a matrix at a time, in float64

def layers(tensor):
    return tensor.unbind() if tensor.dim() == 3 else [tensor]


def lars_by_hand(weight, gradients, lr, trust, momentum, weight_decay):
    v = torch.zeros_like(weight)
    for g in gradients:
        rate = 1.0
        if weight.dim() == 2:
            rate = trust * weight.norm() / (g.norm() + weight_decay * weight.norm())
        v = momentum * v + lr * rate * (g + weight_decay * weight)
        weight = weight - v
    return weight


def muon_by_hand(weight, gradients, lr, momentum, weight_decay, nesterov=True):
    v = torch.zeros_like(weight)
    for g in gradients:
        v = momentum * v + (1 - momentum) * g
        u = momentum * v + (1 - momentum) * g if nesterov else v
        u = u / u.norm()
        for _ in range(5):
            gram = u @ u.T
            u = 3.4445 * u + (-4.7750 * gram + 2.0315 * gram @ gram) @ u
        weight = weight - lr * weight_decay * weight - lr * math.sqrt(max(1, len(u) / len(u.T))) * u
    return weight


@pytest.mark.parametrize("name", BOTH)
def test_updates_are_the_formula(name):
    """Three updates, against float64. Float32 keeps 24 bits; a sum over a matrix of n numbers, and Muon's fifteen
    products with a slope of 3.4445 at 0 each, lose some: 3.4445 ** 5 roundings of the largest change, three times."""
    model = moe()
    gradients = some_gradients(model, 3)
    before = {key: weight.detach().double() for key, weight in model.named_parameters()}
    trained(model, option(name), gradients)
    for key, weight in model.named_parameters():
        if name == "muon" and (key.startswith(("embedding", "head")) or "gate.weight" in key or "norm" in key):
            continue
        decay = 0.0 if weight.dim() == 1 else 0.1
        slices = zip(layers(before[key]), *(layers(each[key].double()) for each in gradients), strict=True)
        wanted = [lars_by_hand(first, each, 0.5, 0.02, 0.9, decay) if name == "lars" else
                  muon_by_hand(first, each, 0.03, 0.9, decay) for first, *each in slices]
        for found, right, first in zip(layers(weight.detach()), wanted, layers(before[key]), strict=True):
            most = 3 * 3.4445 ** 5 * EPS * (right - first).abs().max() + EPS * first.abs().max()
            assert (found.double() - right).abs().max() <= most, key
            assert (right - first).abs().max() > 1e3 * most, "the tolerance sees a change of a thousandth"


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("adjust", ["original", "match_rms_adamw"])
def test_muon_is_torchs_where_torch_has_one(adjust, nesterov):
    """torch.optim.Muon takes one 2-D weight at a time and computes in bfloat16: eps / 2 at each of fifteen products,
    of a singular value of about 1."""
    torch.manual_seed(0)
    ours, theirs = (nn.Sequential(nn.Linear(24, 16, bias=False), nn.Linear(16, 24, bias=False)) for _ in range(2))
    theirs.load_state_dict(ours.state_dict())
    before = {key: weight.detach().clone() for key, weight in ours.named_parameters()}
    gradients = some_gradients(ours, 2)
    trained(ours, option("muon", adjust_lr=adjust, nesterov=nesterov, products="bfloat16"), gradients)
    optimizer = torch.optim.Muon(theirs.parameters(), lr=0.03, weight_decay=0.1, momentum=0.9, nesterov=nesterov,
                                 adjust_lr_fn=adjust)
    for each in gradients:
        for key, weight in theirs.named_parameters():
            weight.grad = each[key].clone()
        optimizer.step()
    for (key, found), wanted in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        change = (wanted - before[key]).norm()
        assert (found - wanted).norm() <= 15 * 2 ** -8 * change / 2, key


def test_adamw_updates_what_muon_leaves_to_it():
    """Bit for bit as optimizer=adamw with adamw's settings does, whose kernel it is."""
    from forge.optimizer.adamw import AdamW

    ours, theirs = moe(), moe()
    gradients = some_gradients(ours, 3)
    trained(ours, option("muon"), gradients)
    trained(theirs, AdamW(0.001, 0.9, 0.95, 1e-8, 0.1, None, "fused", 3, []), gradients)
    same = {key for key, weight in ours.named_parameters() if torch.equal(weight, theirs.get_parameter(key))}
    assert same == {key for key, weight in ours.named_parameters()
                    if weight.dim() == 1 or key.startswith(("embedding", "head")) or "gate.weight" in key}
    assert len(same) == 6 and len(list(ours.parameters())) == 10


@pytest.mark.parametrize("shape", [(3, 16, 16), (1, 40, 8), (2, 8, 40)])
def test_singular_values_come_near_one_and_directions_stay(shape):
    torch.manual_seed(0)
    left, _, right = torch.linalg.svd(torch.randn(shape, dtype=torch.float64), full_matrices=False)
    skewed = left * torch.logspace(0, -1.5, min(shape[1:])) @ right

    def seen(iterations):
        return left.mT @ orthogonal(skewed, iterations) @ right.mT

    values = seen(5).diagonal(dim1=-2, dim2=-1)
    assert values.min() > 0.65 and values.max() < 1.25
    assert (seen(5) - torch.diag_embed(values)).abs().max() < 1e-12
    assert seen(1).diagonal(dim1=-2, dim2=-1).min() < 0.65, "one iteration is not enough: the bound can be missed"


# ---- what GradientUpdate asks of an optimizer

@pytest.mark.parametrize("name", BOTH)
@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_an_update_that_is_not_finite_changes_nothing(name, bad):
    model = moe()
    first, broken = some_gradients(model, 2)
    broken["blocks.0.attention.qkv.weight"][0, 0] = bad
    update, _ = trained(model, option(name), [first])
    before = {key: value.clone() for key, value in update.state_dict().items() if "/" in key}
    weights = [weight.detach().clone() for weight in model.parameters()]
    for key, weight in model.named_parameters():
        weight.grad = broken[key].clone()
    outcome = update()
    assert not outcome.applied and outcome.skipped == 1
    assert all(torch.equal(value, update.state_dict()[key]) for key, value in before.items())
    assert all(torch.equal(found, kept) for found, kept in zip(model.parameters(), weights, strict=True))
    assert model.head.weight.grad is None


@pytest.mark.parametrize("name", BOTH)
@pytest.mark.parametrize("clip", [None, 0.01])
def test_a_scale_that_is_a_power_of_two_changes_no_bit(name, clip):
    results = []
    for precision in (FP32(), Scaled()):
        model = moe()
        _, outcomes = trained(model, option(name, clip=clip), some_gradients(model, 2), precision)
        results.append(([float(outcome.norm) for outcome in outcomes], [w.tolist() for w in model.parameters()]))
    assert results[0] == results[1]


@pytest.mark.parametrize("name", BOTH)
def test_a_layer_without_gradient_is_left_alone_and_an_idle_expert_only_decays(name):
    model = moe()
    (gradients,) = some_gradients(model, 1)
    gradients["blocks.0.feed_forward.down"][1] = 0
    idle = model.blocks[0].feed_forward.down[1].detach().clone()
    update = option(name).build(model, Constant(0), 10, FP32())
    for key, weight in model.named_parameters():
        weight.grad = None if key == "blocks.0.attention.out.weight" else gradients[key]
    kept = model.blocks[0].attention.out.weight.detach().clone()
    update()
    assert torch.equal(model.blocks[0].attention.out.weight, kept)
    ratio = model.blocks[0].feed_forward.down[1] / idle
    shrunk = 1 - (0.5 * 0.02 if name == "lars" else 0.03 * 0.1)
    torch.testing.assert_close(ratio, torch.full_like(ratio, shrunk), rtol=1e-5, atol=0)


@pytest.mark.parametrize("name", BOTH)
def test_groups_scale_the_rate_of_a_layer(name):
    half = [Group("blocks.0.*", 0.5, None, False)]
    plain, scaled = moe(), moe()
    start = {key: weight.detach().clone() for key, weight in plain.named_parameters()}
    gradients = some_gradients(plain, 1)
    trained(plain, option(name), gradients)
    trained(scaled, option(name, groups=half), gradients)
    for key, first in start.items():
        factor = 0.5 if key.startswith("blocks.0.") else 1.0
        change, found = plain.get_parameter(key) - first, scaled.get_parameter(key) - first
        torch.testing.assert_close(found, factor * change, rtol=1e-5, atol=2 ** -22 * float(first.abs().max()))


@pytest.mark.parametrize("name", BOTH)
def test_bfloat16_weights_are_updated_too(name):
    """Of bf16_pure: changes are rounded to 8 bits of a weight, and so is the moment."""
    model, exact = moe().bfloat16(), moe()
    exact.load_state_dict({key: value.float() for key, value in model.state_dict().items()})
    (gradients,) = some_gradients(model, 1)
    rounded = {key: value.bfloat16() for key, value in gradients.items()}
    update, _ = trained(model, option(name), [rounded])
    trained(exact, option(name), [{key: value.float() for key, value in rounded.items()}])
    assert all(value.dtype is torch.bfloat16 for key, value in update.state_dict().items() if key.endswith("momentum"))
    for key, weight in model.named_parameters():
        wanted = exact.get_parameter(key)
        assert (weight.float() - wanted).abs().max() <= 2 ** -8 * 3 * wanted.abs().max(), key


@pytest.mark.parametrize("name", BOTH)
def test_masters_are_what_float32_weights_would_be(name):
    """The optimizer runs on the masters, with the gradients it is given; the norm for clipping is not in play."""
    model, exact = moe().bfloat16(), moe()
    exact.load_state_dict({key: value.float() for key, value in model.state_dict().items()})
    rounded = [{key: value.bfloat16() for key, value in each.items()} for each in some_gradients(model, 3)]
    update, _ = trained(model, option(name), rounded, BF16Master("bfloat16", "float32"))
    trained(exact, option(name), [{key: value.float() for key, value in each.items()} for each in rounded])
    state = update.state_dict()
    for key, weight in model.named_parameters():
        torch.testing.assert_close(state[f"{key}/master"], exact.get_parameter(key).detach(), rtol=1e-6, atol=1e-7)
        assert torch.equal(weight, state[f"{key}/master"].bfloat16())


@pytest.mark.parametrize("name", BOTH)
def test_a_few_updates_lower_the_loss(name):
    model = moe()
    settings = {"lr": 0.02, "adjust_lr": "match_rms_adamw"} if name == "muon" else {"trust": 0.1}
    update = option(name, clip=1.0, **settings).build(model, Constant(0), 20, FP32())
    batch, losses = tiny_batch(rows=4), []
    for _ in range(12):
        losses.append(float(one_pass(model, batch)["loss"]))
        update()
    assert losses[-1] < 0.6 * losses[0], losses


# ---- in a run

@pytest.mark.parametrize("precision", ["fp32", "bf16_master"])
@pytest.mark.parametrize("name", BOTH)
def test_a_resumed_run_is_the_same_to_the_last_bit(name, precision, shards, tmp_path):
    from test_resume import resume_here

    line = [*shards, f"optimizer={name}", f"precision={precision}", "snapshot=inline", "steps=6", "snapshot.every=3"]
    whole = train_here(tmp_path / "whole", *line)
    assert whole.code == 0, whole.err
    assert train_here(tmp_path / "part", *line, "stop_at=3").code == 0
    resumed = resume_here(tmp_path / "part", *line)
    assert resumed.code == 0, resumed.err
    assert resumed.losses == whole.losses and len(whole.losses) == 6
    for file in ("model", "update"):
        found, wanted = (load_file(run.run_dir / f"snapshots/step_00000006/{file}.safetensors")
                         for run in (resumed, whole))
        assert found.keys() == wanted.keys() and all(torch.equal(found[key], wanted[key]) for key in wanted)


@pytest.mark.parametrize(("before", "after"), [("adamw", "lars"), ("lars", "muon"), ("muon", "adamw")])
def test_the_state_of_another_optimizer_is_refused(before, after):
    model = moe()
    optimizers = {"adamw": realise(composed("optimizer=adamw")).optimizer, "lars": option("lars"),
                  "muon": option("muon")}
    update, _ = trained(model, optimizers[before], some_gradients(model, 1))
    other = optimizers[after].build(model, Constant(0), 10, FP32())
    with pytest.raises(ConfigError, match=r"another optimizer's: .* is wanted. Set optimizer= as it was"):
        other.load_state_dict(update.state_dict())


@pytest.mark.parametrize(("words", "said"), [
    (["optimizer=lars", "optimizer.trust=0"], "optimizer.trust=0.0: more than 0 is wanted."),
    (["optimizer=lars", "optimizer.momentum=1"], "optimizer.momentum=1.0: at least 0 and less than 1"),
    (["optimizer=lars", "optimizer.clip=0"], "optimizer.clip=0.0: more than 0 is wanted, or null"),
    (["optimizer=muon", "optimizer.iterations=0"], "optimizer.iterations=0: at least 1"),
    (["optimizer=muon", "optimizer.adamw.lr=-1"], "optimizer.adamw.lr=-1.0: more than 0"),
    (["optimizer=muon", "optimizer.adamw.beta2=1"], "optimizer.adamw.beta2=1.0: at least 0"),
    (["optimizer=muon", "optimizer.weight_decay=-0.1"], "optimizer.weight_decay=-0.1: 0 or more"),
])
def test_settings_that_cannot_work_are_named(words, said):
    with pytest.raises(ConfigError) as raised:
        check(realise(composed(*words)))
    assert said in str(raised.value)


def test_nothing_left_for_muon_is_refused():
    with pytest.raises(ConfigError, match=r"optimizer.adamw.match=\['\*'\] leaves no matrix"):
        option("muon", adamw=ByAdamW(["*"], 0.1, 0.9, 0.95, 1e-8)).build(moe(), Constant(0), 10, FP32())
