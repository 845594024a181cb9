"""Every router on a GPU: equal to the loop, the same bits every time, and no wait for the host."""

from __future__ import annotations

import logging
from importlib.util import find_spec

import pytest
import torch
from mixtures import (
    OPTIONS,
    Case,
    assert_equal_to_the_loop,
    assert_no_memory_is_read_before_it_is_written,
    inputs,
    mixture,
    option,
    results,
)

from forge import notes
from forge.moe_router.loop import Loop

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

# Kernels are compiled for each top_k and each width, so the cases are few, and the other tests take theirs from them.
ONE = Case(1, 1, 1, 64, 48)
MANY_EXPERTS = Case(1, 8, 256, 72, 40)          # most experts are empty, and no width is a whole tile
ODD_WIDTHS = Case(17, 3, 5, 100, 36)            # no multiples of 16 bytes
AIMED = Case(8191, 2, 16, 64, 48, aimed=True)   # all tokens to two experts
SPREAD = Case(8191, 8, 64, 200, 104)
CASES = [ONE, MANY_EXPERTS, ODD_WIDTHS, AIMED, AIMED._replace(tokens=17, aimed=False), SPREAD,
         Case(8191, 1, 16, 64, 48, aimed=True), Case(17, 4, 16, 64, 48), Case(17, 5, 9, 64, 48),
         Case(8191, 6, 16, 64, 48), Case(17, 7, 8, 64, 48)]
IN_FLOAT32 = [ODD_WIDTHS, AIMED, Case(8191, 8, 256, 72, 40)]
ROUTERS = pytest.mark.parametrize("name", OPTIONS)


def router(name, case=AIMED, dtype=torch.bfloat16):
    if name == "sonic" and find_spec("sonicmoe") is None:
        pytest.skip("needs the package sonic-moe")
    if name == "sonic" and (dtype == torch.float32 or case.width % 8 or case.hidden % 8):
        pytest.skip("refused, as its page says")
    return option(name)


@ROUTERS
@pytest.mark.parametrize("case", CASES, ids=str)
def test_bfloat16_equals_the_loop_in_float32(name, case):
    plain = assert_equal_to_the_loop(router(name, case), case, "cuda", torch.bfloat16)
    assert not case.aimed or int((plain["load"][1] > 0).sum()) == case.top_k


@ROUTERS
@pytest.mark.parametrize("case", IN_FLOAT32, ids=str)
def test_float32_equals_the_loop(name, case):
    assert_equal_to_the_loop(router(name, case, torch.float32), case, "cuda", torch.float32)


@ROUTERS
@pytest.mark.parametrize("case", [SPREAD, AIMED, ODD_WIDTHS], ids=str)
def test_the_same_input_gives_the_same_bits(name, case):
    made, told = mixture(router(name, case), case, "cuda", torch.bfloat16), inputs(case, "cuda", torch.bfloat16)
    first = results(made, *told)
    for _ in range(5):
        again = results(made, *told)
        assert all(torch.equal(first[name], again[name]) for name in first)


@ROUTERS
@pytest.mark.parametrize("case", [MANY_EXPERTS, AIMED, AIMED._replace(capacity=1.0)], ids=str)
def test_no_memory_is_read_before_it_is_written(name, case):
    """With a capacity, rows past the last are computed by no expert."""
    assert_no_memory_is_read_before_it_is_written(router(name, case), case, "cuda", torch.bfloat16)


@ROUTERS
def test_nothing_waits_for_the_host(name):
    made, told = mixture(router(name), AIMED, "cuda", torch.bfloat16), inputs(AIMED, "cuda", torch.bfloat16)
    results(made, *told)
    torch.cuda.set_sync_debug_mode("error")
    try:
        results(made, *told)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_sorted_says_what_float32_costs(caplog, monkeypatch):
    monkeypatch.setattr(notes, "_said", set())
    with caplog.at_level(logging.WARNING):
        results(mixture(option("sorted"), ONE, "cuda", torch.float32), *inputs(ONE, "cuda", torch.float32))
    assert "one product an expert" in caplog.text


@ROUTERS
def test_under_autocast_and_inside_a_compiled_function(name):
    case = AIMED._replace(tokens=17, aimed=False)
    made, told = mixture(router(name), case, "cuda", torch.float32), inputs(case, "cuda", torch.float32)
    with torch.autocast("cuda", torch.bfloat16):
        one = results(made, *told)
        made.compile(fullgraph=name != "sonic")
        other = results(made, *told)
    assert one["y"].dtype == torch.bfloat16 and one["gate_up"].dtype == torch.float32
    for name, wanted in one.items():
        assert (other[name].float() - wanted.float()).norm() <= 2**-8 * 6**0.5 * wanted.float().norm(), name


@ROUTERS
def test_experts_without_tokens_have_gradients_of_zero(name):
    made = mixture(router(name), AIMED, "cuda", torch.bfloat16)
    found = results(made, *inputs(AIMED, "cuda", torch.bfloat16))
    for weight in ("gate_up", "down"):
        assert found[weight].shape == getattr(Loop().build(64, 48, AIMED.routing), weight).shape
        assert torch.count_nonzero(found[weight][:-2]) == 0 and (found[weight][-2:] != 0).any()
