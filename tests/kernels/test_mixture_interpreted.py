"""The kernels of moe_router=fused on the CPU, line by line in Triton's interpreter, in float32.

Each against its NumPy emulation, which is checked against the plain router by autograd, and all together against
moe_router=loop. Both add the same n products in another order, and so differ by at most about n * u of the sum of
magnitudes, u = 2**-24; the factor of 8 is for what such differences do to what is computed of them.

Triton decides for the interpreter when it is imported, so these tests run in a process of their own.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from forge.kernels import emulation

UNIT = 2.0**-24
INSIDE = os.environ.get("TRITON_INTERPRET") == "1"
interpreted = pytest.mark.skipif(not INSIDE, reason="runs in the process that test_in_the_interpreter starts")
ROUTERS = Path(__file__).parents[1] / "moe_router" / "test_routers_equal.py"

# tokens, width, hidden, experts, top_k; with each, the part of choices that is dropped
SHAPES = [((1, 8, 8, 1, 1), 0), ((5, 20, 12, 4, 2), 0), ((33, 24, 40, 6, 4), 0.2)]
LARGE = [((257, 40, 24, 16, 3), 0), ((40, 128, 72, 5, 5), 0.9)]


@pytest.mark.skipif(INSIDE, reason="it would start itself")
def test_in_the_interpreter():
    """These tests, and those of all routers with moe_router=fused; not bfloat16, which the interpreter gets wrong."""
    for file, which, least in ((__file__, "", 60), (ROUTERS, "fused and not says and not bfloat16 and not dtype1", 55)):
        done = subprocess.run([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(file), "-k", which],
                              env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout
        assert int(re.search(r"(\d+) passed", done.stdout)[1]) >= least, done.stdout


def drawn(shape, drop=0.0, seed=0):
    """x, gate_up, down, weights, grad and experts of a mixture, as tensors."""
    tokens, width, hidden, num_experts, top_k = shape
    generator = torch.Generator().manual_seed(seed)

    def normal(*size):
        return torch.randn(size, generator=generator)

    experts = torch.rand(tokens, num_experts, generator=generator).argsort(dim=-1)[:, :top_k].contiguous()
    experts[torch.rand(tokens, top_k, generator=generator) < drop] = num_experts
    return (normal(tokens, width), normal(num_experts, 2 * hidden, width), normal(num_experts, width, hidden),
            normal(tokens, top_k).sigmoid(), normal(tokens, width), experts)


def arrays(*tensors):
    return [tensor.detach().numpy() for tensor in tensors]


def assert_close(found, wanted, terms):
    found, wanted = torch.as_tensor(found), torch.as_tensor(wanted)
    assert found.shape == wanted.shape
    assert torch.equal(found.isnan(), wanted.isnan())
    assert (found - wanted).nan_to_num().norm() <= 8 * terms * UNIT * wanted.nan_to_num().norm()


def through(tokens, experts, weights, gate_up, down):
    from forge.moe_router.experts import loop

    return loop(tokens, experts, weights, gate_up, down)


@pytest.mark.parametrize("drop", [0, 0.3])
def test_the_emulation_is_the_plain_router(drop):
    """Forward and backward, written out by hand there, and derived by autograd here."""
    shape = (29, 20, 12, 6, 3)
    x, gate_up, down, weights, grad, experts = (t.double() if t.is_floating_point() else t for t in drawn(shape, drop))
    leaves = [t.requires_grad_() for t in (x, gate_up, down, weights)]
    y = through(x, experts, weights, gate_up, down)
    y.backward(grad)
    x, gate_up, down, weights, grad = arrays(x, gate_up, down, weights, grad)
    where = emulation.place(experts.numpy(), 6, 4)
    h, active = emulation.up(x, gate_up, 3, where)
    found = emulation.combine(emulation.down(active, down, where, True), where.slots, weights)
    weights_grad, h_grad, weighted = emulation.down_backward(grad, down, weights, h, where)
    grads = (emulation.combine(emulation.down(h_grad, gate_up, where, False), where.slots, None),
             emulation.weight_gradient(h_grad, x, where, 3, "right"),
             emulation.weight_gradient(grad, weighted, where, 3, "left"),
             emulation.collect(weights_grad[None], where.slots))
    np.testing.assert_allclose(found, y.detach().numpy(), rtol=1e-12, atol=1e-12)
    for one, leaf in zip(grads, leaves, strict=True):
        np.testing.assert_allclose(one, leaf.grad.numpy(), rtol=1e-10, atol=1e-10)


SCORES = pytest.mark.parametrize("score", ["softmax", "softmax_of_chosen", "sigmoid"])
NORMALIZE = pytest.mark.parametrize("normalize", [False, True])


def gate_choice(logits, bias, top_k, score, normalize):
    from routings import routing

    from forge.moe_router import gate

    how = routing(num_experts=logits.shape[1], top_k=top_k, score=score, normalize=normalize, scale=1.5)
    scores = gate._scores(logits, how)
    experts = gate.choose_experts(gate._keys(logits, scores, bias, how).detach(), top_k, 1, 1)
    return experts, gate._weights(logits, scores, experts, how)


@SCORES
@NORMALIZE
@pytest.mark.parametrize("biased", [False, True])
def test_the_emulation_chooses_as_the_gate_does(score, normalize, biased):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(33, 7, generator=generator).double().requires_grad_()
    bias = torch.randn(7, generator=generator).double() * biased
    experts, weights = gate_choice(logits, bias, 3, score, normalize)
    grad = torch.randn(33, 3, generator=generator).double()
    weights.backward(grad)
    found = emulation.choose(*arrays(logits, bias), 3, score, normalize, 1.5)
    np.testing.assert_array_equal(found[0], experts.numpy())
    np.testing.assert_allclose(found[1], weights.detach().numpy(), rtol=1e-12)
    back = emulation.weights_backward(grad.numpy(), logits.detach().numpy(), found[0], score, normalize, 1.5)
    np.testing.assert_allclose(back, logits.grad.numpy(), rtol=1e-9, atol=1e-12)


@interpreted
@SCORES
@NORMALIZE
@pytest.mark.parametrize("tokens, num_experts, top_k", [(0, 4, 2), (1, 1, 1), (33, 16, 3), (40, 256, 8), (70, 5, 5)])
def test_choosing_and_placing(tokens, num_experts, top_k, score, normalize):
    from forge.kernels import choice, placement

    generator = torch.Generator().manual_seed(0)
    logits, grad = (torch.randn(tokens, size, generator=generator) for size in (num_experts, top_k))
    valid = torch.rand(tokens, generator=generator) < 0.7
    how = choice.Scores(score, normalize, 1.5)
    for bias in (torch.zeros(num_experts), torch.randn(num_experts, generator=generator)):
        experts, weights, load, where = placement.choose_and_place(logits, bias, valid, top_k, 16, how)
        wanted, wanted_weights = gate_choice(logits, bias, top_k, score, normalize)
        assert torch.equal(experts, wanted)
        assert torch.allclose(weights, wanted_weights, rtol=0, atol=4 * num_experts * UNIT)
        for found, ids in zip(load, (wanted[valid], wanted), strict=True):
            assert found.tolist() == torch.bincount(ids.flatten(), minlength=num_experts).tolist()
        assert_placed(where, emulation.place(wanted.numpy(), num_experts, 16))
        back = choice.weights_backward(grad, logits, experts, how)
        assert_close(back, emulation.weights_backward(*arrays(grad, logits, experts), *how).astype(np.float32),
                     4 * num_experts)


def assert_placed(where, wanted):
    count = int(where.num_tiles)
    for found, one in ((where.slots, wanted.slots), (where.sources[: len(wanted.sources)], wanted.sources),
                       (where.ends, wanted.ends), (where.tiles[:, :count], wanted.tiles)):
        assert found.tolist() == one.tolist()


@interpreted
@pytest.mark.parametrize("shape, drop", SHAPES, ids=str)
def test_placing_what_was_chosen(shape, drop):
    from forge.kernels import placement

    experts = drawn(shape, drop)[-1]
    assert_placed(placement.place(experts, shape[3], 16), emulation.place(experts.numpy(), shape[3], 16))


@interpreted
def test_logits_that_are_not_numbers_choose_distinct_experts_and_give_no_weight():
    from forge.kernels import choice, placement

    logits = torch.randn(5, 8, generator=torch.Generator().manual_seed(0))
    logits[1, 3], logits[2], logits[3], logits[4, 2] = float("nan"), float("nan"), -float("inf"), -float("inf")
    experts, weights, _, _ = placement.choose_and_place(
        logits, torch.zeros(8), torch.ones(5, dtype=torch.bool), 3, 16, choice.Scores("softmax", True, 1.0))
    assert torch.equal(experts, logits.sort(dim=-1, descending=True, stable=True).indices[:, :3])
    assert weights.isnan().any(dim=-1).tolist() == [False, True, True, True, False]


@interpreted
@pytest.mark.parametrize("by_copier", [False, True])
@pytest.mark.parametrize("shape, drop", SHAPES, ids=str)
def test_each_product(shape, drop, by_copier, poisoned):
    from forge.kernels import combine, grouped, placement
    from forge.kernels.tilings import Tiling

    how = Tiling(16, 32, 16, 4, 2, 1, by_copier)
    x, gate_up, down, weights, grad, experts = drawn(shape, drop)
    top_k = shape[-1]
    where = placement.place(experts, shape[3], 16)
    like = emulation.place(experts.numpy(), shape[3], 16)
    h, active = grouped.up(x, gate_up, where, how)
    wanted_h, wanted_active = emulation.up(*arrays(x, gate_up), top_k, like)
    assert_close(h, wanted_h, shape[1])
    assert_close(active, wanted_active, shape[1])
    rows = grouped.down(active, down, where, how, transposed=True)
    assert_close(rows, emulation.down(*arrays(active, down), like, True), shape[2])
    assert_close(combine.combine(rows, where.slots, weights),
                 emulation.combine(*arrays(rows, where.slots, weights)), top_k)
    parts, h_grad, weighted = grouped.down_backward(grad, down, weights, h, where, how)
    wanted = emulation.down_backward(*arrays(grad, down, weights, h), like)
    assert_close(combine.collect(parts, where.slots), emulation.collect(wanted[0][None], like.slots), sum(shape[1:3]))
    assert_close(h_grad, wanted[1], shape[1])
    assert_close(weighted, wanted[2], 8)
    assert_close(grouped.down(h_grad, gate_up, where, how, transposed=False),
                 emulation.down(*arrays(h_grad, gate_up), like, False), 2 * shape[2])
    assert_close(grouped.weight_gradient(h_grad, x, where, "right", how),
                 emulation.weight_gradient(*arrays(h_grad, x), like, top_k, "right"), shape[0])
    assert_close(grouped.weight_gradient(grad, weighted, where, "left", how),
                 emulation.weight_gradient(*arrays(grad, weighted), like, top_k, "left"), shape[0])


@pytest.fixture
def poisoned():
    """What is allocated holds not-a-numbers until it is written."""
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory and torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


def results(execute, shape, experts=None, drop=0.0):
    x, gate_up, down, weights, grad, chosen = drawn(shape, drop)
    leaves = [t.requires_grad_() for t in (x, weights, gate_up, down)]
    y = execute(x, chosen if experts is None else experts, weights, gate_up, down)
    y.backward(grad)
    return [y.detach(), *(leaf.grad for leaf in leaves)]


@interpreted
@pytest.mark.parametrize("shape, drop", [*SHAPES, *LARGE, ((0, 8, 8, 2, 1), 0), ((6, 8, 8, 4, 2), 1.0)], ids=str)
def test_the_operator_equals_the_loop(shape, drop, poisoned):
    from forge.moe_router.by_kernels import by_kernels

    found, wanted = (results(execute, shape, drop=drop) for execute in (by_kernels, through))
    for one, plain in zip(found, wanted, strict=True):
        assert_close(one, plain, max(shape[0], 2 * shape[2], shape[1]))


@interpreted
def test_the_same_input_gives_the_same_bits():
    from forge.moe_router.by_kernels import by_kernels

    one, other = (results(by_kernels, SHAPES[-1][0]) for _ in range(2))
    assert all(torch.equal(first, second) for first, second in zip(one, other, strict=True))


@interpreted
def test_all_tokens_to_one_expert():
    from forge.moe_router.by_kernels import by_kernels

    experts = torch.full((70, 1), 2)
    found, wanted = (results(execute, (70, 24, 12, 4, 1), experts) for execute in (by_kernels, through))
    for one, plain in zip(found, wanted, strict=True):
        assert_close(one, plain, 70)
    assert [bool(gradient.any()) for gradient in found[3]] == [False, False, True, False]


def fused(**changes):
    from routings import routing

    from forge.moe_router.fused import Fused

    torch.manual_seed(0)
    return Fused().build(16, 12, routing(num_experts=6, top_k=2, aux_loss=0.1, **changes))


@interpreted
def test_inside_a_compiled_graph():
    mixture, x = fused(), torch.randn(2, 9, 16, generator=torch.Generator().manual_seed(0))
    found = []
    for run in (mixture, torch.compile(mixture, backend="aot_eager", fullgraph=True)):
        mixture.zero_grad()
        y, aux, load = run(x, None)
        (y.square().sum() + aux).backward()
        found.append([y.detach(), aux.detach(), load, *(p.grad for p in mixture.parameters())])
    for one, other in zip(*found, strict=True):
        assert_close(one, other, 32)


@interpreted
def test_choices_that_came_from_other_ranks_are_placed_where_they_came(tmp_path):
    from forge.parallel.exchange import Exchange

    x = torch.randn(2, 9, 16, generator=torch.Generator().manual_seed(0))
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        found = []
        for start in (None, Exchange(torch.distributed.group.WORLD)):
            mixture = fused()
            mixture.start = start or mixture.start
            y, aux, _ = mixture(x, None)
            (y.square().sum() + aux).backward()
            found.append([y.detach(), *(p.grad for p in mixture.parameters())])
    finally:
        torch.distributed.destroy_process_group()
    for one, other in zip(*found, strict=True):
        assert_close(one, other, 32)


@interpreted
def test_a_recomputation_chooses_nothing_again(monkeypatch):
    from forge.checkpointing.recompute import Recomputed, recompute
    from forge.decisions import DECISIONS
    from forge.kernels import placement

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = torch.nn.ModuleList([fused()])

        def block_lists(self):
            return [self.blocks]

        def decisions(self):
            return DECISIONS

    chosen, choose = [], placement.choose_and_place
    monkeypatch.setattr(placement, "choose_and_place", lambda *how: chosen.append(1) or choose(*how))
    x = torch.randn(2, 9, 16, generator=torch.Generator().manual_seed(0))
    found = []
    for model in (Model(), recompute(Model(), every=1, kept=frozenset())):
        block = model.blocks[0]
        y, aux, _ = block(x, None)
        (y.square().sum() + aux).backward()
        found.append([p.grad for p in block.parameters()])
    assert isinstance(block.forward, Recomputed)
    assert len(chosen) == 2
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


@interpreted
def test_what_is_kept_for_backward():
    """x, what enters the activation, the weights and a few integers: no copies of tokens, and no activation."""
    x, gate_up, down, weights, _, experts = drawn((64, 128, 96, 4, 4))
    leaves = {t.requires_grad_().data_ptr() for t in (x, gate_up, down, weights)}
    from forge.moe_router.by_kernels import by_kernels

    kept = {}
    with torch.autograd.graph.saved_tensors_hooks(
            lambda t: kept.setdefault(t.untyped_storage().data_ptr(), t) is None or t, lambda t: t):
        by_kernels(x, experts, weights, gate_up, down)
    num_bytes = sum(t.untyped_storage().nbytes() for pointer, t in kept.items() if pointer not in leaves)
    h = 64 * 4 * 2 * 96 * 4
    assert h <= num_bytes <= 1.05 * h


@interpreted
def test_the_derivative_by_finite_differences_of_the_twin():
    """The kernels compute in float32, where differences say little; so the twin that they equal is differentiated."""
    x, gate_up, down, weights, _, experts = drawn((4, 3, 2, 3, 2))
    inputs = [t.double().requires_grad_() for t in (x, weights, gate_up, down)]
    assert torch.autograd.gradcheck(lambda x, w, u, d: through(x, experts, w, u, d), inputs)


@interpreted
def test_forge_verify_says_what_it_promises(tmp_path):
    small = ("hardware=cpu hardware.threads=1 model.width=32 model.layers=1 model.heads=2 model.kv_heads=2 "
             "model.head_width=16 model.hidden=32 model.routing.num_experts=4 sequence_length=16 global_batch=2")
    done = subprocess.run([sys.executable, "-m", "forge.verify", "moe_router=fused", *small.split(),
                           f"baseline=moe_router=loop {small}", f"run_dir={tmp_path}"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "VERDICT  same maths" in done.stdout, done.stdout
