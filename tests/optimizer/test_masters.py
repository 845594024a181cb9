"""precision=bf16_master: weights are bfloat16, and what they lose in rounding the masters keep."""

import pytest
import torch
from conftest import TINY, composed, train_here
from safetensors.torch import load_file
from torch import nn

from forge.config import check, realise
from forge.errors import ConfigError
from forge.optimizer.adamw import AdamW
from forge.precision.bf16_master import BF16Master
from forge.precision.bf16_pure import BF16Pure
from forge.schedule.constant import Constant

SETTINGS = {"lr": 1e-4, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1, "max_skipped": 3, "groups": [],
            "clip": 1.0}


def built(precision, implementation="loop"):
    torch.manual_seed(0)
    model = precision.convert(nn.Linear(40, 30))
    return model, AdamW(implementation=implementation, **SETTINGS).build(model, Constant(0), 10, precision)


def updated(model, update, times):
    for number in range(times):
        for weight in model.parameters():
            noise = torch.randn(weight.shape, generator=torch.Generator().manual_seed(number))
            weight.grad = (noise * 0.1).to(weight.dtype)
        update()
    return update.state_dict()


@pytest.fixture(autouse=True)
def _no_cost(monkeypatch):
    monkeypatch.setattr("forge.precision.cost.say_cost", lambda *args: None)


@pytest.mark.parametrize("implementation", ["loop", "foreach", "fused", "triton"])
def test_masters_are_what_float32_weights_would_be(implementation):
    """Gradients are bfloat16 on both sides, so the two only differ by the order of roundings: a few units a step."""
    model, update = built(BF16Master("bfloat16", "float32"), implementation)
    plain = nn.Linear(40, 30)
    plain.load_state_dict({name: value.float() for name, value in model.state_dict().items()})
    groups = [{"params": [plain.weight], "weight_decay": 0.1}, {"params": [plain.bias], "weight_decay": 0.0}]
    twin = torch.optim.AdamW(groups, lr=1e-4, betas=(0.9, 0.95), eps=1e-8)
    for number in range(5):
        for weight in plain.parameters():
            noise = torch.randn(weight.shape, generator=torch.Generator().manual_seed(number))
            weight.grad = (noise * 0.1).bfloat16().float()
        nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        twin.step()
    state = updated(model, update, 5)
    for name in ("weight", "bias"):
        master = state[f"{name}/master"]
        assert master.dtype is torch.float32
        torch.testing.assert_close(master, getattr(plain, name), rtol=1e-6, atol=1e-7)
        assert torch.equal(getattr(model, name), master.bfloat16())


def test_small_updates_are_kept_and_without_masters_lost():
    """1e-4 is under half of the last bit of weights of 0.1 and more, so bfloat16 alone never moves them."""
    moved = {}
    for precision in (BF16Master("bfloat16", "float32"), BF16Pure("bfloat16", "float32")):
        model, update = built(precision)
        large = model.weight.detach().abs() > 0.14
        before = model.weight.detach().clone()
        for _ in range(20):
            model.weight.grad = torch.ones_like(model.weight)
            model.bias.grad = torch.zeros_like(model.bias)
            update()
        moved[type(precision).__name__] = (model.weight != before)[large].float().mean()
    assert moved["BF16Master"] == 1 and moved["BF16Pure"] == 0


def test_a_resumed_run_goes_on_from_the_masters(shards, tmp_path):
    line = [*shards, "precision=bf16_master", "snapshot=inline", "snapshot.every=3", "model.width=16"]
    whole = train_here(tmp_path / "whole", *line)
    assert whole.code == 0, whole.err
    resumed = train_here(tmp_path / "resumed", *line, f"resume={whole.run_dir}/snapshots/step_00000003")
    assert resumed.code == 0, resumed.err
    for part in ("model", "update"):
        files = [load_file(run.run_dir / f"snapshots/step_00000006/{part}.safetensors") for run in (whole, resumed)]
        assert files[0].keys() == files[1].keys() and all(torch.equal(files[0][key], files[1][key]) for key in files[0])


def test_a_snapshot_without_masters_is_refused():
    _, update = built(BF16Master("bfloat16", "float32"))
    state = updated(*built(BF16Master("bfloat16", "float32")), 1)
    with pytest.raises(ConfigError, match="no float32 masters"):
        update.load_state_dict({key: value for key, value in state.items() if not key.endswith("/master")})


def test_it_composes():
    check(realise(composed(*TINY, "precision=bf16_master", "optimizer.implementation=triton", "run_dir=x")))


@pytest.mark.parametrize("implementation", ["loop", "fused"])
def test_weights_put_in_after_the_build_are_what_is_trained(implementation):
    model, update = built(BF16Master("bfloat16", "float32"), implementation)
    with torch.no_grad():
        model.weight.fill_(0.5)
    model.weight.grad, model.bias.grad = torch.zeros_like(model.weight), torch.zeros_like(model.bias)
    update()
    assert torch.equal(model.weight, torch.full_like(model.weight, 0.5))        # its decay is 1e-5 of it


def test_the_kernel_is_refused_for_weights_in_half_precision_without_masters():
    with pytest.raises(ConfigError, match=r"triton keeps its state in float32.*set precision=bf16_master"):
        check(realise(composed(*TINY, "precision=bf16_pure", "optimizer.implementation=triton", "run_dir=x")))
