"""The fused kernels, in the dtype they are used in, against the plain twin in float32."""

from __future__ import annotations

import itertools

import pytest
import torch

from forge.attention import Layout
from forge.attention.cudnn import CuDNN
from forge.attention.eager import Eager
from forge.attention.flash import Flash
from forge.attention.flex import Flex
from forge.attention.sdpa import SDPA

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

OPTIONS = {"eager": Eager(), "sdpa": SDPA(), "flash": Flash(), "cudnn": CuDNN(), "flex": Flex()}
WIDTH = 64


def layouts(length):
    place = torch.arange(length, device="cuda", dtype=torch.int32)
    documents = torch.stack([place // (length // 3 + 1), place % 2])
    for causal, some, window in itertools.product((True, False), (None, documents), (None, 40)):
        yield Layout(causal, some, window, length, torch.device("cuda"))


def results(option, who, q, k, v):
    out = option(q, k, v, option.plan(who), 0.0)
    weights = torch.linspace(-1, 1, out.numel(), device="cuda").view_as(out)
    return [out, *torch.autograd.grad((out.float() * weights).sum(), (q, k, v))]


@pytest.mark.parametrize("length", [1, 17, 129, 512])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 1)])
@pytest.mark.parametrize("name", OPTIONS)
def test_bf16_equals_eager_in_float32(name, heads, kv_heads, length):
    """Weights, results and what is summed in between are each rounded to bfloat16 (half of eps = 2 ** -7): forward
    three times, backward five; errors are taken relative to the largest number."""
    torch.manual_seed(length)
    q, k, v = (torch.randn(2, n, length, WIDTH, device="cuda", dtype=torch.bfloat16, requires_grad=True)
               for n in (heads, kv_heads, kv_heads))
    exact = [tensor.detach().float().requires_grad_() for tensor in (q, k, v)]
    for who in layouts(length):
        wanted = results(Eager(), who, *exact)
        found = results(OPTIONS[name], who, q, k, v)
        for one, other, roundings in zip(found, wanted, (3, 8, 8, 8), strict=True):
            most = roundings * torch.finfo(torch.bfloat16).eps / 2 * max(1.0, other.abs().max().item())
            assert (one.float() - other).abs().max().item() <= most


@pytest.mark.parametrize("option", [Flash(), CuDNN(), Flex()])
def test_under_autocast_float32_heads_reach_the_half_precision_kernel(option):
    """A model may hand over float32 queries (rotated in float32) beside bfloat16 values."""
    q, k = (torch.randn(2, n, 64, WIDTH, device="cuda") for n in (4, 2))
    who = Layout(True, None, None, 64, torch.device("cuda"))
    with torch.no_grad(), torch.autocast("cuda", torch.bfloat16):
        assert option(q, k, k.bfloat16(), option.plan(who), 0.0).dtype is torch.bfloat16


def test_flex_compiles_once_for_all_batches():
    torch._dynamo.reset()
    compiled = torch.compile(Flex().__call__, fullgraph=True)
    q = torch.randn(2, 4, 256, WIDTH, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for seed in range(3):
            generator = torch.Generator("cuda").manual_seed(seed)
            who = torch.randint(0, 4, (2, 256), generator=generator, device="cuda", dtype=torch.int32).sort(1).values
            plan = Flex().plan(Layout(True, who, None, 256, torch.device("cuda")))
            compiled(q, q, q, plan, 0.0).sum().backward()
