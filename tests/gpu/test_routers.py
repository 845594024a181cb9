"""Routers on a GPU: equal to the loop, the same bits every time, and no wait for the host."""

from __future__ import annotations

import logging

import pytest
import torch
from routings import routing

from forge import notes
from forge.moe_router.fused import Fused
from forge.moe_router.loop import Loop
from forge.moe_router.sorted import Sorted

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

WIDTH, HIDDEN, EXPERTS = 64, 48, 16
ROUTERS = pytest.mark.parametrize("router", [Sorted(), Fused()], ids=["sorted", "fused"])


def _mixture(router, top_k, dtype):
    torch.manual_seed(0)
    how = routing(num_experts=EXPERTS, top_k=top_k, normalize=True, aux_loss=0.3, aux_scope="sequence", z_loss=0.1)
    with torch.device("cuda"):
        return router.build(WIDTH, HIDDEN, how).to(dtype)


def _inputs(rows, length, dtype):
    generator = torch.Generator("cuda").manual_seed(3)
    x, gradient = torch.randn(2, rows, length, WIDTH, device="cuda", generator=generator).to(dtype)
    return x, torch.arange(length, device="cuda").expand(rows, -1) < length - 2, gradient


def _results(mixture, x, valid, gradient):
    mixture.zero_grad()
    x = x.clone().requires_grad_()
    y, aux, load = mixture(x, valid)
    torch.autograd.backward([y, aux], [gradient.to(y.dtype), None])
    return {"y": y.detach(), "aux": aux.detach(), "load": load, "x": x.grad,
            **{name: parameter.grad for name, parameter in mixture.named_parameters()}}


@ROUTERS
@pytest.mark.parametrize("shape", [(1, 3), (2, 37), (4, 256)], ids=str)
@pytest.mark.parametrize("top_k", [1, 2, 8])
def test_bfloat16_equals_the_loop_in_float32(router, top_k, shape):
    """What enters a product, and what leaves it, is rounded to bfloat16 (half of eps = 2 ** -8 each): forward three
    times (up, activation, down), backward as often again; the errors are independent and add up as a root."""
    inputs = _inputs(*shape, torch.bfloat16)
    ours = _results(_mixture(router, top_k, torch.bfloat16), *inputs)
    plain = _mixture(Loop(), top_k, torch.bfloat16).float()
    theirs = _results(plain, inputs[0].float(), inputs[1], inputs[2].float())
    assert torch.equal(ours["load"], theirs["load"])
    for name, wanted in theirs.items():
        assert (ours[name].float() - wanted).norm() <= 2**-8 * 6**0.5 * wanted.norm(), name


@ROUTERS
def test_the_same_input_gives_the_same_bits(router):
    mixture, inputs = _mixture(router, 4, torch.bfloat16), _inputs(4, 512, torch.bfloat16)
    first = _results(mixture, *inputs)
    for _ in range(5):
        again = _results(mixture, *inputs)
        assert all(torch.equal(first[name], again[name]) for name in first)


@ROUTERS
def test_nothing_waits_for_the_host(router):
    mixture, inputs = _mixture(router, 2, torch.bfloat16), _inputs(2, 64, torch.bfloat16)
    _results(mixture, *inputs)
    torch.cuda.set_sync_debug_mode("error")
    try:
        _results(mixture, *inputs)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@ROUTERS
def test_float32_equals_the_loop_and_says_what_it_costs(router, caplog, monkeypatch):
    """Sums of n terms in another order: about n * u of the sum of magnitudes; n is at most the tokens, u = 2**-24."""
    monkeypatch.setattr(notes, "_said", set())
    inputs = _inputs(2, 37, torch.float32)
    with caplog.at_level(logging.WARNING):
        ours = _results(_mixture(router, 2, torch.float32), *inputs)
    assert "one product an expert" in caplog.text
    theirs = _results(_mixture(Loop(), 2, torch.float32), *inputs)
    for name, wanted in theirs.items():
        assert (ours[name] - wanted).norm() <= 4 * 2 * 2 * 37 * 2**-24 * wanted.norm(), name


@ROUTERS
def test_under_autocast_and_inside_a_compiled_function(router):
    mixture, inputs = _mixture(router, 2, torch.float32), _inputs(2, 37, torch.float32)
    with torch.autocast("cuda", torch.bfloat16):
        one = _results(mixture, *inputs)
        mixture.compile(fullgraph=True)
        other = _results(mixture, *inputs)
    assert one["y"].dtype == torch.bfloat16 and one["gate_up"].dtype == torch.float32
    for name, wanted in one.items():
        assert (other[name].float() - wanted.float()).norm() <= 2**-8 * 6**0.5 * wanted.float().norm(), name
