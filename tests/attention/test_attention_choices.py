"""What the options refuse, what they say, and that a new batch costs no new compilation."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest
import torch
from torch._dynamo.testing import CompileCounter
from torch.nn.attention.flex_attention import create_block_mask

from forge import notes
from forge.attention import Layout
from forge.attention.blocks import may_look
from forge.attention.cudnn import CuDNN
from forge.attention.eager import Eager
from forge.attention.eager_stored import EagerStored
from forge.attention.flash import Flash
from forge.attention.flex import Flex
from forge.attention.sdpa import SDPA

CPU = torch.device("cpu")


def config(compute="bfloat16", device="cuda", head_width=64, dropout=0.0, **choices):
    return SimpleNamespace(precision=SimpleNamespace(compute=compute), hardware=SimpleNamespace(device=device),
                           model=SimpleNamespace(head_width=head_width, dropout=dropout),
                           choices={"checkpointing": "none", "compile": "none", **choices})


@pytest.mark.parametrize(("option", "name"), [(Flash(), "flash"), (CuDNN(), "cudnn")])
@pytest.mark.parametrize("compute", ["float32", "tf32"])
def test_half_precision_kernels_refuse_float32_on_a_gpu(option, name, compute):
    (problem,) = option.problems(config(compute))
    assert problem.startswith(f"attention={name} computes in half precision: add precision=bf16")
    assert list(option.problems(config(compute, device="cpu"))) == []
    assert list(option.problems(config())) == []


@pytest.mark.parametrize(("option", "width", "fits"), [
    (Flash(), 256, True), (Flash(), 257, False), (Flash(), 20, True),
    (CuDNN(), 128, True), (CuDNN(), 136, False), (CuDNN(), 20, False)])
def test_head_width_has_limits(option, width, fits):
    assert (list(option.problems(config(head_width=width))) == []) == fits


@pytest.mark.parametrize(("option", "dropout", "fits"), [
    (CuDNN(), 0.125, True), (CuDNN(), 0.1, False), (Flex(), 0.0, True), (Flex(), 0.1, False)])
def test_dropout_that_a_kernel_does_not_know_is_refused(option, dropout, fits):
    problems = list(option.problems(config(dropout=dropout)))
    assert (problems == []) == fits
    assert all("model.dropout" in problem for problem in problems)


def test_flex_is_refused_where_compiled_code_would_recompute_it():
    both = {"checkpointing": "full", "compile": "blocks"}
    (problem,) = Flex().problems(config(**both))
    assert "checkpointing=full with compile=blocks" in problem
    assert list(Flex().problems(config(device="cpu", **both))) == []
    assert not any([*Flex().problems(config(checkpointing="full")), *Flex().problems(config(compile="whole"))])


@pytest.fixture
def said(monkeypatch, caplog):
    monkeypatch.setattr(notes, "_said", set())
    caplog.set_level(logging.WARNING, "forge")
    return lambda: [record.message for record in caplog.records]


@pytest.mark.parametrize(("option", "words"), [(CuDNN(), "cudnn needs an NVIDIA GPU"), (Flex(), "no backward")])
def test_a_cpu_takes_the_plain_path_and_says_so_once(option, words, said):
    for _ in range(2):
        option.plan(Layout(True, None, None, 5, CPU))
    assert [words in sentence and "this run takes sdpa" in sentence for sentence in said()] == [True]


@pytest.mark.parametrize("hidden", ["documents", "window"])
def test_flash_says_that_it_masks(hidden, said):
    documents = torch.zeros(1, 5, dtype=torch.int32) if hidden == "documents" else None
    Flash().plan(Layout(True, documents, 2 if hidden == "window" else None, 5, CPU))
    assert ["sdpa with a mask" in sentence for sentence in said()] == [True]


def test_flash_says_that_a_cpu_kernel_has_no_dropout_also_while_compiling(said):
    q = torch.randn(1, 2, 5, 16)
    plan = Flash().plan(Layout(True, None, None, 5, CPU))
    compiled = torch.compile(Flash().__call__, backend="eager", fullgraph=True)
    compiled(q, q, q, plan, 0.0)
    assert said() == []
    for _ in range(2):
        compiled(q, q, q, plan, 0.5)
    assert ["no dropout on a CPU" in sentence for sentence in said()] == [True]


@pytest.mark.parametrize("option", [Eager(), EagerStored(), SDPA(), Flash(), CuDNN(), Flex()])
@pytest.mark.parametrize("documents", [False, True])
def test_a_new_batch_is_not_a_new_compilation(option, documents):
    torch._dynamo.reset()
    counter = CompileCounter()
    compiled = torch.compile(option.__call__, backend=counter, fullgraph=True)
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        q, k, v = (torch.randn(2, 4, 17, 16, generator=generator) for _ in range(3))
        who = torch.randint(0, 3, (2, 17), generator=generator, dtype=torch.int32) if documents else None
        plan = option.plan(Layout(True, who, None, 17, CPU))
        assert torch.equal(compiled(q, k, v, plan, 0.0), option(q, k, v, plan, 0.0))
    assert counter.frame_count == 1


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_with_block_masks_equals_eager_and_is_compiled_once():
    """The path of GPUs, as far as a CPU can walk it: forward, not fused."""
    torch._dynamo.reset()
    counter = CompileCounter()
    compiled = torch.compile(Flex().__call__, backend=counter, fullgraph=True)
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        q, k, v = (torch.randn(2, heads, 129, 16, generator=generator) for heads in (4, 2, 2))
        who = torch.randint(0, 3, (2, 129), generator=generator, dtype=torch.int32).sort(1).values
        plan = create_block_mask(may_look(True, 20, who), 2, None, 129, 129, device="cpu")
        layout = Layout(True, who, 20, 129, CPU)
        wanted = Eager()(q, k, v, Eager().plan(layout), 0.0)
        most = (16 + 129) * torch.finfo(torch.float32).eps * wanted.abs().max()     # roundings of two sums
        assert (compiled(q, k, v, plan, 0.0) - wanted).abs().max() <= most
    assert counter.frame_count == 1
