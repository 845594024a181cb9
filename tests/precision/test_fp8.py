"""precision=fp8: how much its roundings change, that emulation computes what torch._scaled_mm does, which layers it
takes and what it says about them."""

from __future__ import annotations

import copy
import logging
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from conftest import train_here
from tiny import ROUTING, tiny_batch, tiny_model
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

from forge import notes
from forge.checkpointing.full import Full
from forge.errors import ConfigError
from forge.precision import Precision, eight_bits, scaled
from forge.precision.bf16 import BF16
from forge.precision.eight_bits import FORWARD, GRADIENT, ScaledProduct, has_units, product, quantise
from forge.precision.fp8 import FP8
from forge.precision.fp32 import FP32
from forge.precision.scaled import ScaledLinear

CPU = torch.device("cpu")
LAYERS = ["*.attention.qkv", "*.attention.out", "*.feed_forward.up", "*.feed_forward.down"]
BITS = {FORWARD: 3, GRADIENT: 2}                # of mantissa that are stored
FINEST = {FORWARD: 2.0 ** -9, GRADIENT: 2.0 ** -16}     # the smallest number above 0


def option(layers=LAYERS):
    return FP8(layers, True, True, "float32", None, "float32")


@pytest.fixture(autouse=True)
def nothing_said_yet(monkeypatch, caplog):
    monkeypatch.setattr(notes, "_said", set())
    monkeypatch.setattr(scaled, "_reached", set())
    monkeypatch.setattr("forge.precision.cost.linear_ms", lambda dtype: 1.0)
    caplog.set_level(logging.WARNING, "forge")


def numbers(*shape, seed=0, spread=3.0):
    """Normally distributed, with sizes that span some powers of ten."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.randn(shape, generator=generator).mul(spread).exp()
    return torch.randn(shape, generator=generator) * sizes


def one_pass(model, chosen, batch=None):
    batch = batch or tiny_batch()
    model.zero_grad()
    with chosen.autocast(CPU):
        scaled_loss, loss_sum, _ = model(batch, torch.tensor(1 / batch.num_targets))
    scaled_loss.backward()
    return {"loss": loss_sum, **{name: weight.grad.clone() for name, weight in model.named_parameters()}}


# ---- one tensor

@pytest.mark.parametrize("dtype", [FORWARD, GRADIENT])
@pytest.mark.parametrize("factor", [1e-12, 1.0, 1e12])
def test_a_number_is_rounded_to_the_bits_of_the_format(dtype, factor):
    """By at most half a unit in the last place: 2 ** -(bits + 1) of the number, or half the finest step near 0."""
    x = numbers(64, 48) * factor
    rounded, inverse = quantise(x, dtype)
    assert rounded.float().isfinite().all()
    assert rounded.dtype is dtype and inverse.dtype is torch.float32
    assert rounded.float().abs().max() == torch.finfo(dtype).max
    error = (rounded.double() * inverse.double() - x.double()).abs()
    half = 2.0 ** -(BITS[dtype] + 1)
    bound = torch.maximum(half * x.double().abs(), FINEST[dtype] / 2 * inverse.double()) * (1 + 2 ** -20)
    assert (error <= bound).all()
    assert (error > 0.45 * half * x.double().abs()).any(), "a format with one bit more would not reach this"


@pytest.mark.parametrize("bad", [float("inf"), -float("inf"), float("nan")])
def test_what_is_not_finite_stays_so(bad):
    x = torch.ones(16, 16)
    x[3, 5] = bad
    assert product(quantise(x, FORWARD), quantise(torch.ones(16, 16), FORWARD), torch.float32, False, False) \
        .isfinite().logical_not().any()


def test_zeros_are_zeros():
    rounded, inverse = quantise(torch.zeros(16, 16), GRADIENT)
    assert (rounded.float() == 0).all() and inverse.isfinite()


# ---- one product

@pytest.mark.parametrize("made", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("left", [FORWARD, GRADIENT])
def test_emulation_computes_what_scaled_mm_does(left, made):
    """The same factors, exact in float32; sums of k terms differ by k roundings of float32, and the result is rounded
    once more to bfloat16."""
    k = 48
    a, (b, b_scale) = quantise(numbers(32, k), left), quantise(numbers(16, k, seed=1), FORWARD)
    emulated, kernel = (product(a, (b.t(), b_scale), made, by_kernel, False) for by_kernel in (False, True))
    largest = (a[0].float().abs() @ b.t().float().abs()) * a[1] * b_scale
    most = k * 2.0 ** -24 * largest + (2.0 ** -8 * kernel.abs().float() if made is torch.bfloat16 else 0)
    assert emulated.dtype is kernel.dtype is made
    assert ((emulated.float() - kernel.float()).abs() <= most).all()
    assert kernel.float().abs().max() > 0


def exact(x, weight, gradient):
    """y and both gradients of one layer, in float64, from the factors as they are rounded."""
    x, weight = (rounded.double() * inverse.double() for rounded, inverse in (quantise(x, FORWARD),
                                                                              quantise(weight, FORWARD)))
    rounded, inverse = quantise(gradient.bfloat16(), GRADIENT)
    gradient = rounded.double() * inverse.double()
    return x @ weight.T, gradient @ weight, gradient.T @ x


@pytest.mark.parametrize("by_kernel", [False, True])
@pytest.mark.parametrize("autocast", [False, True])
def test_a_layers_three_products_are_those_of_the_rounded_factors(by_kernel, autocast):
    """y and the gradient of x are rounded to bfloat16, eps / 2 = 2 ** -8; the gradient of the weight is float32."""
    x, weight = numbers(32, 48).requires_grad_(), numbers(16, 48, seed=1).requires_grad_()
    gradient = numbers(32, 16, seed=2)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        y = ScaledProduct.apply(x, weight, by_kernel, True)
    y.backward(gradient.to(y.dtype))
    assert (y.dtype, x.grad.dtype, weight.grad.dtype) == (torch.bfloat16, torch.float32, torch.float32)
    for found, wanted, rounding in zip((y, x.grad, weight.grad), exact(x.detach(), weight.detach(), gradient),
                                       (2 ** -8, 2 ** -8, 48 * 2 ** -24), strict=True):
        assert (found.double() - wanted).norm() <= rounding * wanted.norm()


@pytest.mark.parametrize("fast", [False, True])
def test_fast_accumulation_is_for_forward_only(fast, monkeypatch):
    seen, kernel = [], torch._scaled_mm

    def noted(*factors, use_fast_accum, **how):
        seen.append(use_fast_accum)
        return kernel(*factors, **how)

    monkeypatch.setattr(torch, "_scaled_mm", noted)
    layer = scaled_linear(48, 16, bias=False)
    layer.by_kernel, layer.fast = True, fast
    layer(numbers(16, 48).requires_grad_()).sum().backward()
    assert seen == [fast, False, False]


@pytest.mark.parametrize("dtype", [FORWARD, GRADIENT])
def test_no_largest_number_leaves_the_format(dtype):
    """The scale is rounded, so the largest number may end above the format's largest by a rounding of float32."""
    largest = torch.finfo(dtype).max
    sizes = torch.rand(100_000, generator=torch.Generator().manual_seed(0)) + 1
    reached = sizes * (largest / sizes)
    assert reached.max() > largest
    assert (reached.to(dtype).float() == largest).all()


def test_rows_that_are_no_multiple_of_16_change_nothing():
    layer = scaled_linear(48, 16, bias=True)
    x = numbers(2, 17, 48)
    y = layer(x)
    y.backward(numbers(2, 17, 16, seed=3).bfloat16())
    rows, weight = x.flatten(0, 1), layer.weight.detach()
    wanted, _, of_weight = exact(rows, weight, numbers(2, 17, 16, seed=3).flatten(0, 1))
    assert y.shape == (2, 17, 16)
    assert (y.flatten(0, 1).double() - wanted - layer.bias).norm() <= 2 * 2 ** -8 * wanted.norm()
    assert (layer.weight.grad.double() - of_weight).norm() <= 48 * 2 ** -24 * of_weight.norm()
    gradient = numbers(2, 17, 16, seed=3)
    assert ((layer.bias.grad - gradient.sum((0, 1))).abs() <= 2 * 2 ** -8 * gradient.abs().sum((0, 1))).all()


def test_only_wanted_gradients_are_computed():
    layer, x = scaled_linear(48, 16, bias=False), numbers(16, 48).requires_grad_()
    layer(x).sum().backward()
    wanted, x.grad, layer.weight.grad = x.grad, None, None
    layer.weight.requires_grad_(False)
    layer(x).sum().backward()
    assert torch.equal(x.grad, wanted) and layer.weight.grad is None
    with torch.no_grad():
        assert not layer(x).requires_grad


def scaled_linear(inside, outside, bias):
    torch.manual_seed(0)
    layer = nn.Linear(inside, outside, bias=bias)
    layer.__class__ = ScaledLinear
    layer.kind, layer.by_kernel, layer.fast = "alone", False, True
    return layer


# ---- the model

def test_protocol_weights_and_names():
    chosen = option()
    assert isinstance(chosen, Precision)
    model = chosen.convert(tiny_model(layers=2))
    assert {weight.dtype for weight in model.parameters()} == {torch.float32}
    assert model.state_dict().keys() == tiny_model(layers=2).state_dict().keys()
    assert {name.split(".", 2)[2] for name, part in model.named_modules() if isinstance(part, ScaledLinear)} == {
        "attention.qkv", "attention.out", "feed_forward.up", "feed_forward.down"}


def test_a_pass_is_as_near_float32_as_the_formats_allow():
    """bfloat16 stores 7 bits of mantissa, e5m2 two: errors are at most 2 ** 5 times those of bf16, and above them."""
    bf16 = BF16("model", True, "float32", None, "float32")
    wanted = one_pass(tiny_model(layers=2), FP32())
    coarse, fine = (one_pass(each.convert(tiny_model(layers=2)), each) for each in (option(), bf16))

    def errors(found):
        return {name: float((found[name] - value).norm() / value.norm()) for name, value in wanted.items()}

    for name, error in errors(coarse).items():
        if name != "loss":      # errors of single tokens cancel in a sum
            assert 2 * errors(fine)[name] < error < 2 ** 5 * errors(fine)[name], name
    assert 0 < errors(coarse)["loss"] < 2 ** 5 * 20 * torch.finfo(torch.bfloat16).eps / 2


def test_gates_experts_and_head_keep_their_format():
    model = option().convert(tiny_model(layers=1, routing=ROUTING))
    assert sorted(name for name, part in model.named_modules() if isinstance(part, ScaledLinear)) == [
        "blocks.0.attention.out", "blocks.0.attention.qkv"]
    one_pass(model, option())


def test_what_was_computed_in_8_bits_is_said_once(caplog):
    model = option().convert(tiny_model(layers=2, routing=ROUTING))
    for _ in range(2):
        one_pass(model, option())
    assert [record.message for record in caplog.records] == [
        "precision=fp8: PyTorch has 8-bit products for NVIDIA GPUs of compute capability 8.9 and later only. Here the "
        "same numbers are computed from rounded factors, which takes longer than precision=bf16.",
        "precision=fp8: products in 8 bits in blocks.*.attention.out, blocks.*.attention.qkv; all others in bfloat16."]


class PastItsLayers(nn.Module):
    """A feed-forward that reads its weights itself, as a fused one would."""

    def __init__(self, plain):
        super().__init__()
        self.up, self.down = plain.up, plain.down

    def forward(self, x):
        gate, up = F.linear(x, self.up.weight).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


@pytest.mark.parametrize("compiled", [False, True])
def test_a_layer_that_is_not_called_is_named(compiled, caplog):
    torch._dynamo.reset()
    model = tiny_model(layers=2)
    for block in model.blocks:
        block.feed_forward = PastItsLayers(block.feed_forward)
    model = option().convert(model)
    for block in model.blocks if compiled else ():
        block.compile(backend="aot_eager", fullgraph=True)
    one_pass(model, option())
    said = [record.message for record in caplog.records]
    assert any(sentence.startswith("precision=fp8 has no effect on blocks.*.feed_forward.up: ") for sentence in said)
    assert any("8 bits in blocks.*.attention.out, blocks.*.attention.qkv, blocks.*.feed_forward.down;" in sentence
               for sentence in said)


def test_odd_sizes_stay_in_bfloat16_and_are_named(caplog):
    model = option().convert(tiny_model(layers=2, head_width=10))       # 4 * 10 + 2 * 2 * 10 = 80, and 40
    one_pass(model, option())
    said = [record.message for record in caplog.records]
    assert said[0] == ("precision=fp8: blocks.*.attention.out stays in bfloat16, because its sizes 40 and 32 are not "
                       "both multiples of 16.")
    assert said[-1].startswith("precision=fp8: products in 8 bits in blocks.*.attention.qkv, blocks.*.feed_forward.")
    assert type(model.blocks[1].attention.out) is nn.Linear


def test_patterns_that_match_nothing_are_refused():
    with pytest.raises(ConfigError, match=r"precision.layers=\['\*.mlp.\*'\] matches no linear layer of a block. There "
                                          r"are blocks.\*.attention.out, blocks.\*.attention.qkv, blocks"):
        option(["*.mlp.*"]).convert(tiny_model(layers=1))
    with pytest.raises(ConfigError, match="matches no linear layer of a block"):
        option(["head"]).convert(tiny_model(layers=1))
    (problem,) = option([]).problems(SimpleNamespace())
    assert "precision.layers=[] leaves nothing" in problem
    assert list(option().problems(SimpleNamespace())) == []


def test_recomputed_blocks_give_the_same_bits_and_compile_as_one_graph():
    torch._dynamo.reset()
    wanted = one_pass(option().convert(tiny_model(layers=10)), option())
    counter, model = CompileCounterWithBackend("aot_eager"), Full()(option().convert(tiny_model(layers=10)))
    recomputed = one_pass(model, option())
    for block in model.blocks:
        block.compile(backend=counter, fullgraph=True)
    compiled = one_pass(model, option())
    assert counter.frame_count == 1, "all blocks share one graph"
    for found in (recomputed, compiled):
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)


@pytest.mark.slow
def test_compiled_is_as_near_float32_as_eager():
    """Fused kernels keep in float32 what eager ones round to bfloat16, which moves numbers over the edges of e4m3: two
    independent errors of the same size."""
    torch._dynamo.reset()
    wanted, eager = one_pass(tiny_model(), FP32()), one_pass(option().convert(tiny_model()), option())
    model = option().convert(tiny_model())
    for block in model.blocks:
        block.compile(fullgraph=True)
    compiled = one_pass(model, option())
    for name, value in wanted.items():
        assert (compiled[name] - value).norm() <= 1.5 * (eager[name] - value).norm() + 0.01 * value.norm(), name


def test_a_deep_copy_is_bound_to_itself():
    model = option().convert(tiny_model(layers=1))
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for weight in model.parameters():
            weight.zero_()
    assert one_pass(twin, option())["loss"] == one_pass(option().convert(tiny_model(layers=1)), option())["loss"]


@pytest.mark.parametrize(("capability", "has"), [((8, 0), False), ((8, 6), False), ((8, 9), True), ((9, 0), True)])
def test_which_gpus_have_units(capability, has, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert has_units(torch.device("cuda")) is has
    assert not has_units(CPU)
    assert eight_bits.ADA == (8, 9)


def test_a_run_learns_as_with_bf16(shards, tmp_path):
    """Six updates lower the loss by as much, to a tenth: e4m3's 4 bits of a number, averaged over a batch."""
    losses = {}
    for precision in ("bf16", "fp8"):
        run = train_here(tmp_path / precision, *shards, f"precision={precision}", "steps=12", "optimizer.lr=0.01")
        assert run.code == 0, run.err
        losses[precision] = run.losses
    fallen = {precision: found[1] - found[12] for precision, found in losses.items()}
    assert fallen["fp8"] == pytest.approx(fallen["bf16"], rel=0.1) and fallen["bf16"] > 0.5
    assert losses["fp8"] != losses["bf16"]
