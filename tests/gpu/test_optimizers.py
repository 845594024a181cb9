"""lars and muon on a GPU: the same as on the CPU, and no wait for the host."""

from __future__ import annotations

import pytest
import torch
from tiny import ROUTING, tiny_model

from forge.optimizer.lars import LARS
from forge.optimizer.muon import ByAdamW, Muon
from forge.precision.fp32 import FP32
from forge.schedule.constant import Constant

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

MATCH = ["embedding.*", "head.*", "*.gate.*"]


def option(name, products="float32"):
    if name == "lars":
        return LARS(0.5, 0.02, 0.9, 0.1, 1.0, 3, [])
    return Muon(0.03, 0.9, True, 5, "original", products, 0.1, 1.0, 3, ByAdamW(MATCH, 0.001, 0.9, 0.95, 1e-8), [])


def updated(chosen, device, number):
    """(model, update) after so many updates."""
    model = tiny_model(layers=2, routing=ROUTING).to(device)
    update = chosen.build(model, Constant(0), 10, FP32())
    for seed in range(number):
        give_gradients(model, seed)
        update()
    return model, update


def give_gradients(model, seed):
    generator = torch.Generator().manual_seed(seed)
    for weight in model.parameters():
        weight.grad = (0.01 * torch.randn(weight.shape, generator=generator)).to(weight.device)


@pytest.mark.parametrize(("name", "products", "rounding"), [
    ("lars", "float32", 2 ** -12), ("muon", "float32", 2 ** -12), ("muon", "bfloat16", 15 * 2 ** -9)])
def test_the_gpu_computes_what_the_cpu_does(name, products, rounding):
    """Some thousand float32 roundings of an update, eps / 2 = 2 ** -24 each; or fifteen products in bfloat16."""
    start = tiny_model(layers=2, routing=ROUTING)
    wanted, _ = updated(option(name), "cpu", 3)
    found, _ = updated(option(name, products), "cuda", 3)
    for key, before in start.named_parameters():
        change = wanted.get_parameter(key) - before
        assert (found.get_parameter(key).cpu() - wanted.get_parameter(key)).norm() <= rounding * change.norm(), key


@pytest.mark.parametrize("name", ["lars", "muon"])
@pytest.mark.parametrize("bad", [False, True])
def test_an_update_never_waits_for_the_host(name, bad):
    model, update = updated(option(name, "bfloat16"), "cuda", 2)
    give_gradients(model, 5)
    if bad:
        model.head.weight.grad[0, 0] = float("inf")
    before = [weight.detach().clone() for weight in model.parameters()]
    torch.cuda.set_sync_debug_mode("error")
    try:
        outcome = update()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert bool(outcome.applied) is not bad
    same = [torch.equal(weight, kept) for weight, kept in zip(model.parameters(), before, strict=True)]
    assert all(same) if bad else not any(same)
