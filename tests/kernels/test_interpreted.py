"""forge's Triton kernels against their plain twins, on the CPU, line by line in Triton's interpreter.

In float32: the interpreter's bfloat16 is wrong. tests/gpu/test_kernels.py runs the same kernels on a GPU. A row is
summed in blocks, and so in another order than PyTorch's: at most about n * u of the sum, u = 2**-24, n its length.

Triton decides for the interpreter when it is imported, so these tests run in a process of their own, which the first
of them starts.
"""

import os
import re
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

from forge.batch import IGNORED
from forge.loss.overwriting import overwrite_plainly

UNIT = 2.0**-24
INSIDE = os.environ.get("TRITON_INTERPRET") == "1"
interpreted = pytest.mark.skipif(not INSIDE, reason="runs in the process that test_in_the_interpreter starts")


@pytest.mark.skipif(INSIDE, reason="it would start itself")
def test_in_the_interpreter():
    done = subprocess.run([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__],
                          env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert int(re.search(r"(\d+) passed", done.stdout)[1]) >= 16, done.stdout


@pytest.fixture
def kernels():
    from forge.kernels import adamw, cross_entropy

    return {"adamw": adamw, "cross_entropy": cross_entropy}


@interpreted
@pytest.mark.parametrize("width", [24, 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gelu_and_norm(monkeypatch, width, dtype):
    """Against the separate operators. float64: the kernel computes in it, so the errors are its roundings."""
    from forge.kernels import gelu_norm as kernel

    monkeypatch.setattr(kernel, "PROGRAMS", 3)              # several rows a program, and one program short of a row
    h, gradient = (drawn(8, width, seed=seed).to(dtype).requires_grad_() for seed in (0, 1))
    weight, bias = (drawn(width, seed=seed).to(dtype).requires_grad_() for seed in (2, 3))
    separate = F.layer_norm(F.gelu(h, approximate="tanh"), (width,), weight, bias, 1e-5)
    separate.backward(gradient.detach())
    with torch.no_grad():
        y, mean, scale = kernel.gelu_norm(h, weight, bias, 1e-5)
        found = kernel.gelu_norm_backward(gradient, h, weight, mean, scale)
    unit = UNIT if dtype is torch.float32 else 2.0**-53
    for one, other in zip((y, *found), (separate, h.grad, weight.grad, bias.grad), strict=True):
        assert (one - other).norm() <= 8 * width * unit * other.norm()


@interpreted
@pytest.mark.parametrize("shape", [(2, 3, 5, 6), (1, 4, 2, 16)])
@pytest.mark.parametrize("kind", ["head", "element"])
@pytest.mark.parametrize("layout", ["heads first", "tokens first"])
def test_heads_and_gate(monkeypatch, shape, kind, layout):
    """Against the separate operators: an exponential, a sum, a quotient and two products, at most 8 roundings of each
    number; gates of a head are sums of its numbers, so relative to the sum of their sizes, D roundings more."""
    from forge.kernels import gated as kernel
    from forge.operators.gate import gated, gated_plainly

    monkeypatch.setattr(kernel, "TILE", 32)                 # several programs a token, and one that is not full
    batch, heads, tokens, width = shape
    x = drawn(*shape, seed=0)
    x = x.transpose(1, 2).contiguous().transpose(1, 2) if layout == "tokens first" else x
    gate = 4 * drawn(batch, tokens, heads if kind == "head" else heads * width, seed=1)
    gradient = drawn(batch, tokens, heads * width, seed=2)
    results = []
    for function, dtype in ((gated, torch.float32), (gated_plainly, torch.float64)):
        inputs = [tensor.detach().to(dtype).requires_grad_() for tensor in (x, gate)]
        y = function(*inputs)
        results.append((y.detach(), *torch.autograd.grad(y, inputs, gradient.to(dtype))))
    ours, exact = results
    for one, other in zip(ours[:2], exact[:2], strict=True):
        assert one.shape == other.shape and ((one - other).abs() <= 8 * UNIT * other.abs()).all()
    slope = (torch.sigmoid(gate.double()) * torch.sigmoid(-gate.double())).unflatten(-1, (heads, -1))
    sizes = (gradient.double().unflatten(-1, (heads, -1)) * x.double().transpose(1, 2)).abs() * slope
    sizes = sizes.sum(-1) if kind == "head" else sizes.flatten(2)
    # 1 - sigmoid cancels where a gate is open: its rounding is relative to 1, not to itself.
    opened = 1 / torch.sigmoid(-gate.double())
    assert ((ours[2] - exact[2]).abs() <= (8 + width + 4 * opened) * UNIT * sizes).all()


@interpreted
def test_the_derivative_of_gelu_and_norm_by_finite_differences():
    from forge.operators.inner_norm import GeluNorm

    layer = GeluNorm(6, 1e-5).double()
    inputs = [drawn(*shape, seed=seed).double().requires_grad_() for seed, shape in enumerate([(3, 6), (6,), (6,)])]

    def function(h, weight, bias):
        return torch.func.functional_call(layer, {"weight": weight, "bias": bias}, (h,))

    assert torch.autograd.gradcheck(function, inputs)


def drawn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@interpreted
@pytest.mark.parametrize("block", [64, 1024])
@pytest.mark.parametrize(("vocabulary", "columns"), [(37, 37), (50, 64), (257, 320)])
def test_cross_entropy(kernels, monkeypatch, vocabulary, columns, block):
    monkeypatch.setattr(kernels["cross_entropy"], "BLOCK", block)
    logits, scale = drawn(9, columns) * 5, torch.tensor(0.25)
    targets = torch.arange(9) * 5 % vocabulary
    targets[::4] = IGNORED
    found, wanted = logits.clone(), logits.clone()
    losses = kernels["cross_entropy"].overwrite(found, targets, scale, vocabulary)
    assert (losses - overwrite_plainly(wanted, targets, scale, vocabulary)).abs().max() <= vocabulary * UNIT * 10
    assert (found - wanted).abs().max() <= vocabulary * UNIT * 0.25
    assert torch.count_nonzero(found[:, vocabulary:]) == 0 and torch.count_nonzero(found[::4]) == 0
    assert not torch.equal(found, logits)


@interpreted
def test_the_loss_takes_the_kernel_where_it_runs(kernels, monkeypatch):
    from forge.loss.inplace import Inplace
    from forge.loss.plain import Plain

    results = []
    for loss, interpret in ((Plain(1), "0"), (Inplace(1), "1")):
        monkeypatch.setenv("TRITON_INTERPRET", interpret)
        hidden, weight = drawn(7, 8).requires_grad_(), drawn(30, 8, seed=1).requires_grad_()
        scaled, total = loss(hidden, weight, torch.arange(7), torch.tensor(0.5))
        scaled.backward()
        results.append([scaled.detach(), total, hidden.grad, weight.grad])
    for found, wanted in zip(*results, strict=True):
        torch.testing.assert_close(found, wanted, rtol=30 * 4 * UNIT, atol=30 * 4 * UNIT)


@interpreted
def test_adamw(kernels, monkeypatch):
    """Tensors of a block and a bit, and of less; half precision is the GPU's test."""
    from forge.optimizer.one_launch import OneLaunchAdamW

    monkeypatch.setattr(kernels["adamw"], "BLOCK", 256)
    ours = [drawn(3, 100), drawn(17, seed=1)]
    theirs = [weight.clone() for weight in ours]

    def groups(weights):
        return [{"params": weights[:1], "weight_decay": 0.1}, {"params": weights[1:], "weight_decay": 0.0}]

    one = OneLaunchAdamW(groups(ours), 1e-2, (0.9, 0.999), 1e-8, master=None)
    twin = torch.optim.AdamW(groups(theirs), lr=1e-2, betas=(0.9, 0.999), eps=1e-8, fused=True)
    for seed, skipped in enumerate((0.0, 1.0, 0.0, 0.0)):
        for weight, other in zip(ours, theirs, strict=True):
            weight.grad = other.grad = drawn(*weight.shape, seed=10 + seed)
        for optimizer in (one, twin):
            optimizer.grad_scale, optimizer.found_inf = torch.tensor(2.0), torch.tensor(skipped)
            optimizer.step()
    for weight, other in zip(ours, theirs, strict=True):
        assert one.state[weight]["step"] == 3
        for name in ("exp_avg", "exp_avg_sq"):
            torch.testing.assert_close(one.state[weight][name], twin.state[other][name], rtol=8 * UNIT, atol=8 * UNIT)
        torch.testing.assert_close(weight, other, rtol=16 * UNIT, atol=16 * UNIT)


@interpreted
def test_what_the_kernel_cannot_hold_stops_before_it_is_touched(kernels):
    """It knows addresses only: another dtype would be read past its end."""
    weight = drawn(8).bfloat16()
    rows = [(weight, weight, weight, weight, weight)]
    tables = kernels["adamw"].Tables([8], weight.device)
    one = torch.ones(())
    with pytest.raises(AssertionError):
        kernels["adamw"].adamw(tables, rows, [(0.1, 0.0)], torch.ones(2), one, one, {"beta1": 0, "beta2": 0, "eps": 1})


@interpreted
def test_a_parameter_whose_gradient_comes_late_does_not_restart_the_count(kernels):
    from forge.optimizer.one_launch import OneLaunchAdamW

    late, early = drawn(4), drawn(4, seed=1)
    one = OneLaunchAdamW([{"params": [late, early], "weight_decay": 0.0}], 1e-2, (0.9, 0.99), 1e-8, master=None)
    for count in range(1, 4):
        early.grad, late.grad = torch.ones(4), torch.ones(4) if count == 3 else None
        one.step()
        assert one.state[early]["step"] == count
    assert one.state[late]["step"] == 3


@interpreted
def test_float64_is_left_to_torch(kernels, caplog):
    from conftest import composed

    from forge.config import realise
    from forge.precision.fp32 import FP32

    config = realise(composed("optimizer.implementation=triton", "run_dir=x"))
    made = {dtype: config.optimizer.build(torch.nn.Linear(2, 2).to(dtype), config.schedule, 3, FP32()).optimizer
            for dtype in (torch.float32, torch.float64)}
    assert [type(optimizer).__name__ for optimizer in made.values()] == ["OneLaunchAdamW", "AdamW"]
