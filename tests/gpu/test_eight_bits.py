"""precision=fp8 on a GPU with 8-bit units: the kernel equals the emulation, compiles, and never waits for the host."""

from __future__ import annotations

import pytest
import torch
from tiny import tiny_batch, tiny_model

from forge.checkpointing.full import Full
from forge.checkpointing.none import KeepAll
from forge.checkpointing.selective import Selective
from forge.compile.blocks import Blocks
from forge.compile.none import NotCompiled
from forge.compile.whole import Whole
from forge.precision.eight_bits import FORWARD, GRADIENT, ScaledProduct, has_units, product, quantise
from forge.precision.fp8 import FP8
from forge.precision.fp32 import FP32

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(
    not torch.cuda.is_available() or not has_units(torch.device("cuda")), reason="needs a GPU with 8-bit units")]

OPTION = FP8(["*.attention.qkv", "*.attention.out", "*.feed_forward.up", "*.feed_forward.down"], True, True, "float32",
             None, "float32")
NONE, BLOCKS, WHOLE = NotCompiled(), Blocks(False, True, "default"), Whole(False, True)
SHAPES = pytest.mark.parametrize("shape", [(16, 16, 16), (64, 48, 80), (1024, 768, 2304), (4096, 3072, 768)], ids=str)


def numbers(*shape, seed=0):
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(shape, device="cuda", generator=generator)


@SHAPES
@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("left", [FORWARD, GRADIENT])
@pytest.mark.parametrize("made", [torch.bfloat16, torch.float32])
def test_the_kernel_equals_the_emulation_and_float64(made, left, fast, shape):
    """The emulation rounds to bfloat16 twice, the kernel at most once (half of eps = 2 ** -8 each); Hopper adds fast
    products up in about 14 bits, which is finer than either."""
    m, k, n = shape
    a, (b, b_scale) = quantise(numbers(m, k), left), quantise(numbers(n, k, seed=1), FORWARD)
    kernel, emulated = (product(a, (b.t(), b_scale), made, by_kernel, fast) for by_kernel in (True, False))
    exact = (a[0].double() @ b.t().double()) * a[1].double() * b_scale.double()
    assert kernel.dtype is emulated.dtype is made
    assert (kernel.double() - exact).norm() <= 2 ** -8 * exact.norm()
    assert (emulated.double() - exact).norm() <= 2 ** -8 * exact.norm()


@SHAPES
def test_a_layers_three_products_equal_the_emulation(shape):
    """As above, of y and both gradients."""
    m, k, n = shape
    results = []
    for by_kernel in (True, False):
        x, weight = numbers(m, k).requires_grad_(), numbers(n, k, seed=1).requires_grad_()
        with torch.autocast("cuda", torch.bfloat16):
            y = ScaledProduct.apply(x, weight, by_kernel, True)
        y.backward(numbers(m, n, seed=2).bfloat16())
        results.append((y.detach(), x.grad, weight.grad))
    for kernel, emulated in zip(*results, strict=True):
        assert kernel.dtype is emulated.dtype
        assert (kernel.double() - emulated.double()).norm() <= 2 ** -7 * emulated.double().norm()


def trained(precision, checkpointing=KeepAll(), compiled=NONE, length=64):  # noqa: B008
    """The loss and the gradients of one pass, in float32."""
    batch, device = tiny_batch(rows=4, length=length), torch.device("cuda")
    model = compiled(checkpointing(precision.convert(tiny_model(layers=3, head_width=64).cuda())))
    with precision.autocast(device):
        scaled, _, _ = model(batch.to(device), torch.tensor(1 / batch.num_targets, device=device))
    scaled.backward()
    return {"loss": scaled.detach(), **{name: weight.grad.float() for name, weight in model.named_parameters()}}


@pytest.mark.parametrize("length", [64, 17])
@pytest.mark.parametrize(("checkpointing", "compiled"), [
    (KeepAll(), NONE), (KeepAll(), BLOCKS), (KeepAll(), WHOLE), (Full(), NONE), (Full(), BLOCKS),
    (Selective(1, ["matmul", "attention"]), BLOCKS)])
def test_the_model_is_as_near_float32_as_the_emulation(checkpointing, compiled, length, monkeypatch):
    """Both round each factor to 4 bits, at places that differ by their roundings to bfloat16: two independent errors of
    the same size. 68 tokens are no multiple of 16."""
    torch._dynamo.reset()
    wanted = trained(FP32(), length=length)
    kernel = trained(OPTION, checkpointing, compiled, length)
    monkeypatch.setattr("forge.precision.scaled.has_units", lambda device: False)
    emulated = trained(OPTION, length=length)
    for name, value in wanted.items():
        if name != "loss":
            assert (kernel[name] - value).norm() <= 1.5 * (emulated[name] - value).norm(), name
    assert (kernel["loss"] - wanted["loss"]).abs() <= 0.05 * wanted["loss"]


def test_nothing_waits_for_the_host():
    device = torch.device("cuda")
    model, batch = OPTION.convert(tiny_model(layers=2, head_width=64).cuda()), tiny_batch(rows=4, length=64).to(device)
    scale = torch.ones((), device=device)

    def one():
        with OPTION.autocast(device):
            scaled, _, _ = model(batch, scale)
        scaled.backward()

    one()
    torch.cuda.set_sync_debug_mode("error")
    try:
        one()
    finally:
        torch.cuda.set_sync_debug_mode("default")
