"""Which number formats each option gives to weights, hidden stream and products, and what it says about them."""

from __future__ import annotations

import copy
import logging
from types import SimpleNamespace

import pytest
import torch
from tiny import one_pass, tiny_batch, tiny_model
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils._python_dispatch import TorchDispatchMode

from forge import notes
from forge.checkpointing.full import Full
from forge.precision import LossScale, Precision, cost
from forge.precision.bf16 import BF16
from forge.precision.bf16_master import BF16Master
from forge.precision.bf16_pure import BF16Pure
from forge.precision.fp16 import FP16
from forge.precision.fp32 import FP32
from forge.precision.tf32 import TF32

CPU = torch.device("cpu")
SCALE = LossScale(65536.0, 2.0, 0.5, 2000)
OPTIONS = {
    "fp32": FP32(), "tf32": TF32(), "bf16": BF16("model", True, "float32", None, "float32"),
    "bf16 blocks": BF16("blocks", True, "float32", None, "float32"),
    "bf16 stream": BF16("model", False, "bfloat16", "bfloat16", "tf32"),
    "bf16_pure": BF16Pure("bfloat16", "float32"), "bf16_master": BF16Master("bfloat16", "float32"),
    "fp16": FP16(True, "float32", None, "float32", SCALE)}


@pytest.fixture(autouse=True)
def modes_and_notes(monkeypatch):
    monkeypatch.setattr(notes, "_said", set())
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    yield
    torch.set_float32_matmul_precision(before[0])
    torch.backends.cudnn.allow_tf32 = before[1]


class Products(TorchDispatchMode):
    """The dtypes of the matrix products, in order."""

    def __init__(self):
        super().__init__()
        self.dtypes = []

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        if operator in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
            self.dtypes.append(args[-1].dtype)
        return operator(*args, **(kwargs or {}))


def forward(option, model):
    with Products() as products, option.autocast(CPU):
        scaled, loss_sum, _ = model(tiny_batch(), torch.tensor(1.0))
    return scaled, loss_sum, products.dtypes


@pytest.mark.parametrize("name", OPTIONS)
def test_protocol_and_weights(name):
    option = OPTIONS[name]
    assert isinstance(option, Precision)
    model = option.convert(tiny_model(layers=2))
    assert {weight.dtype for weight in model.parameters()} == {getattr(torch, option.parameter)}
    assert model.rotary.frequencies.dtype is torch.float32
    assert model.residual_dtype is (None if option.residual is None else getattr(torch, option.residual))


@pytest.mark.parametrize(("name", "dtype", "head"), [
    ("fp32", torch.float32, torch.float32), ("tf32", torch.float32, torch.float32),
    ("bf16", torch.bfloat16, torch.bfloat16), ("bf16 blocks", torch.bfloat16, torch.float32),
    ("bf16 stream", torch.bfloat16, torch.bfloat16), ("bf16_pure", torch.bfloat16, torch.bfloat16),
    ("bf16_master", torch.bfloat16, torch.bfloat16), ("fp16", torch.float16, torch.float16)])
def test_products_are_computed_in(name, dtype, head):
    option = OPTIONS[name]
    _, _, dtypes = forward(option, option.convert(tiny_model(layers=2)))
    assert dtypes == [dtype] * (len(dtypes) - 1) + [head]
    assert len(dtypes) == 2 * 4 + 1


@pytest.mark.parametrize(("name", "seen"), [
    ("bf16", torch.float32), ("bf16 stream", torch.bfloat16), ("bf16_pure", torch.bfloat16), ("fp32", torch.float32)])
def test_hidden_stream_is_held_in(name, seen):
    model = OPTIONS[name].convert(tiny_model(layers=2))
    dtypes = []
    model.blocks[1].register_forward_pre_hook(lambda block, args: dtypes.append(args[0].dtype))
    forward(OPTIONS[name], model)
    assert dtypes == [seen]


@pytest.mark.parametrize("name", [name for name in OPTIONS if name not in ("fp32", "tf32")])
def test_half_precision_is_near_float32_and_not_equal_to_it(name):
    """A rounding to 8 bits of mantissa at each of about ten products and sums a block, of a loss of 4 nats a token."""
    option = OPTIONS[name]
    _, exact, _ = forward(FP32(), tiny_model(layers=2))
    scaled, rounded, _ = forward(option, option.convert(tiny_model(layers=2)))
    assert rounded.dtype is torch.float32
    assert 0 < (rounded - exact).abs() / exact < 20 * torch.finfo(torch.bfloat16).eps / 2
    scaled.backward()


def test_fp32_leaves_every_bit_as_it_was():
    wanted = one_pass(tiny_model(), tiny_batch())
    found = one_pass(FP32().convert(tiny_model()), tiny_batch())
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_tied_weights_stay_tied():
    model = torch.nn.Module()
    model.embedding, model.head = torch.nn.Embedding(5, 4), torch.nn.Linear(4, 5, bias=False)
    model.head.weight = model.embedding.weight
    BF16Pure("bfloat16", "float32").convert(model)
    assert model.head.weight is model.embedding.weight and model.head.weight.dtype is torch.bfloat16


def test_a_deep_copy_of_autocast_blocks_is_bound_to_itself():
    option = OPTIONS["bf16 blocks"]
    model = option.convert(tiny_model(layers=2))
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for weight in model.parameters():
            weight.zero_()
    assert torch.equal(forward(option, twin)[1], forward(option, option.convert(tiny_model(layers=2)))[1])


def test_autocast_blocks_can_be_recomputed_and_compiled():
    """More blocks than torch.compile is willing to compile one by one."""
    torch._dynamo.reset()
    option, counter = OPTIONS["bf16 blocks"], CompileCounterWithBackend("aot_eager")
    wanted = one_pass(option.convert(tiny_model(layers=10)), tiny_batch())
    model = Full()(option.convert(tiny_model(layers=10)))
    assert torch.equal(one_pass(model, tiny_batch())["blocks.0.attention.qkv.weight"],
                       wanted["blocks.0.attention.qkv.weight"])
    for block in model.blocks:
        block.compile(backend=counter, fullgraph=True)
    found = one_pass(model, tiny_batch())
    assert counter.frame_count == 1
    assert (found["loss"] - wanted["loss"]).abs() < 20 * torch.finfo(torch.bfloat16).eps / 2 * wanted["loss"]


@pytest.mark.parametrize(("option", "mode"), [
    (FP32(), "highest"), (TF32(), "high"), (OPTIONS["bf16"], "highest"), (OPTIONS["bf16 stream"], "high")])
def test_float32_products_of_the_process(option, mode):
    torch.set_float32_matmul_precision("medium")
    option.convert(tiny_model(layers=1))
    assert torch.get_float32_matmul_precision() == mode
    assert torch.backends.cudnn.allow_tf32 == (mode == "high")


@pytest.mark.parametrize(("enabled", "casts"), [(True, 1), (False, 2)])
def test_cache_casts_a_weight_once(enabled, casts):
    """Twice the same weight in a pass: one node of the graph casts it, or two."""
    weight, x = torch.ones(4, 4, requires_grad=True), torch.ones(4, 4)
    with BF16("model", enabled, "float32", None, "float32").autocast(CPU):
        graph = (x @ weight, x @ weight)
    assert len({product.grad_fn.next_functions[1][0] for product in graph}) == casts


def said(caplog):
    return [record.message for record in caplog.records]


@pytest.mark.parametrize(("option", "slow"), [(OPTIONS["bf16"], torch.bfloat16), (OPTIONS["fp16"], torch.float16),
                                              (OPTIONS["bf16_pure"], torch.bfloat16)])
def test_a_slow_format_says_its_factor(option, slow, monkeypatch, caplog):
    caplog.set_level(logging.WARNING, "forge")
    monkeypatch.setattr(cost, "linear_ms", lambda dtype: 1.4 if dtype is slow else 1.0)
    option.convert(tiny_model(layers=1))
    assert said(caplog) == []
    monkeypatch.setattr(cost, "linear_ms", lambda dtype: 12.34 if dtype is slow else 1.0)
    for _ in range(2):
        option.convert(tiny_model(layers=1))
    (sentence,) = said(caplog)
    assert f"{option.compute} matrix products take 12.3 times as long as float32" in sentence


def test_tf32_says_that_a_cpu_has_none(caplog):
    caplog.set_level(logging.WARNING, "forge")
    TF32().convert(tiny_model(layers=1))
    assert ["no effect" in sentence for sentence in said(caplog)] == [True]


def test_measuring_draws_no_random_numbers_and_is_quick():
    torch.manual_seed(0)
    state = torch.get_rng_state()
    assert 0 < cost.linear_ms(torch.float32) < 100
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(("changed", "words"), [
    ({"init_scale": 0.0}, "init_scale=0.0"), ({"growth_factor": 0.5}, "growth_factor=0.5"),
    ({"backoff_factor": 1.0}, "backoff_factor=1.0"), ({"growth_interval": 0}, "growth_interval=0")])
def test_a_loss_scale_that_cannot_work_is_refused(changed, words):
    option = FP16(True, "float32", None, "float32", LossScale(**{**vars(SCALE), **changed}))
    (problem,) = option.problems(SimpleNamespace())
    assert words in problem
    assert list(OPTIONS["fp16"].problems(SimpleNamespace())) == []


def test_a_half_stream_does_not_fit_a_float32_head():
    (problem,) = BF16("blocks", True, "float32", "bfloat16", "float32").problems(SimpleNamespace())
    assert "precision.residual=bfloat16 does not fit precision.scope=blocks" in problem
    assert list(OPTIONS["bf16 blocks"].problems(SimpleNamespace())) == []
