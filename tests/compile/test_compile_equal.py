"""Compiled models compute what the uncompiled one computes, within rounding, under the same names."""

from __future__ import annotations

import functools
import logging
import shutil

import pytest
import torch
import torch.distributed as dist
from tiny import one_pass, tiny_batch, tiny_model

from forge import notes
from forge.checkpointing.full import Full
from forge.checkpointing.none import KeepAll
from forge.checkpointing.selective import Selective
from forge.compile.blocks import Blocks
from forge.compile.max_autotune import MaxAutotune
from forge.compile.none import NotCompiled
from forge.compile.whole import Whole
from forge.errors import Exit, UnusableEnvironment

BLOCKS, WHOLE = Blocks(False, True, "default"), Whole(False, True)
AUTOTUNED = MaxAutotune(False, True)


def assert_close(found, wanted):
    """Fused kernels sum in another order: the longest sums here, over 61 words or 48 hidden numbers and once more over
    34 tokens, take about 100 roundings, each of half a unit in the last place of the largest number; three blocks,
    forward and backward, pass them on six times."""
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        most = 6 * 100 * torch.finfo(torch.float32).eps / 2 * value.abs().max()
        assert (found[name] - value).abs().max() <= most, name


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()


@pytest.fixture
def traced_only(monkeypatch):
    """Graphs are captured and differentiated as ever, and run operator by operator instead of as new machine code."""
    patched = functools.partial(torch.compile, backend="aot_eager")
    monkeypatch.setattr(torch, "compile", lambda function, mode, **how: patched(function, **how))


def test_none_returns_the_model_itself():
    model = tiny_model()
    assert NotCompiled()(model) is model


@pytest.mark.slow
@pytest.mark.parametrize("option", [BLOCKS, WHOLE], ids=["blocks", "whole"])
def test_compiled_equals_eager(option):
    model = option(tiny_model(layers=3))
    for seed in (1, 0):
        found = one_pass(model, tiny_batch(seed=seed))
    assert_close(found, one_pass(tiny_model(layers=3), tiny_batch()))
    assert model.state_dict().keys() == tiny_model(layers=3).state_dict().keys()


@pytest.mark.parametrize("checkpointing", [KeepAll(), Full(), Selective(1, ["matmul"])])
@pytest.mark.parametrize("option", [WHOLE, AUTOTUNED], ids=["whole", "max_autotune"])
def test_traced_as_one_graph_under_the_same_names(option, checkpointing, traced_only):
    model = option(checkpointing(tiny_model(layers=2)))
    assert_close(one_pass(model, tiny_batch()), one_pass(tiny_model(layers=2), tiny_batch()))
    assert model.state_dict().keys() == tiny_model(layers=2).state_dict().keys()


def test_no_compiler_is_said_before_anything_is_compiled(monkeypatch):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    for option in (BLOCKS, WHOLE, AUTOTUNED):
        with pytest.raises(UnusableEnvironment, match=r"needs a C\+\+ compiler, and g\+\+ is not on this machine"):
            option(tiny_model())
    assert UnusableEnvironment.exit_code is Exit.ENVIRONMENT


def test_another_compiler_may_be_named(monkeypatch, traced_only):
    monkeypatch.setenv("CXX", "my-compiler -v")
    monkeypatch.setattr(shutil, "which", lambda name: "/bin/x" if name == "my-compiler" else None)
    WHOLE(tiny_model())


@pytest.fixture
def gloo(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("checkpointing", [KeepAll(), Full(), Selective(1, ["matmul"])])
@pytest.mark.parametrize("option", [BLOCKS, WHOLE], ids=["blocks", "whole"])
def test_works_inside_distributed_data_parallel(option, checkpointing, gloo, traced_only, monkeypatch):
    """Many small buckets: torch must not cut the graphs at them."""
    monkeypatch.setattr(torch.nn.Module, "compile", compile_without_code)
    model = option(checkpointing(tiny_model(layers=2)))
    wrapped = torch.nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.01)
    found = one_pass(wrapped, tiny_batch())
    wanted = one_pass(tiny_model(layers=2), tiny_batch())
    assert_close({name.removeprefix("module."): value for name, value in found.items()}, wanted)


def compile_without_code(module, mode, **how):
    module._compiled_call_impl = torch.compile(module._call_impl, mode=mode, **how)


@pytest.mark.parametrize(("option", "world_size", "says"), [
    (WHOLE, 2, True), (AUTOTUNED, 2, True), (WHOLE, 1, False), (BLOCKS, 2, False)])
def test_several_ranks_are_told_that_nothing_overlaps(option, world_size, says, traced_only, monkeypatch, caplog):
    monkeypatch.setattr(notes, "_said", set())
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: world_size)
    caplog.set_level(logging.WARNING, "forge")
    option(tiny_model())
    assert ["overlaps with nothing" in record.message for record in caplog.records] == [True] * says
