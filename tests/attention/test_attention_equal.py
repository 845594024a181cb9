"""Every attention option computes what the plain product, mask, softmax, product computes."""

from __future__ import annotations

import itertools

import pytest
import torch

from forge.attention import Layout
from forge.attention.blocks import may_look
from forge.attention.cudnn import CuDNN
from forge.attention.eager import Eager
from forge.attention.eager_stored import EagerStored
from forge.attention.flash import Flash
from forge.attention.flex import Flex
from forge.attention.mask import mask, stored_mask
from forge.attention.sdpa import SDPA

OPTIONS = {"eager_stored": EagerStored(), "sdpa": SDPA(), "flash": Flash(), "cudnn": CuDNN(), "flex": Flex()}
LENGTHS = (1, 17, 129)              # alone, odd, one more than a kernel's block
HEADS = ((4, 4), (4, 2), (4, 1))    # queries and keys
WIDTH = 16


def layout(length, causal=True, documents=None, window=None):
    return Layout(causal, documents, window, length, torch.device("cpu"))


def layouts(length):
    documents = torch.tensor([[0] * (length // 3) + [1] * (length - length // 3),
                              [min(place % 5, 1) for place in range(length)]], dtype=torch.int32)
    for causal, some, window in itertools.product((True, False), (None, documents), (None, 1, 4)):
        yield layout(length, causal, some, window)


def inputs(length, heads, kv_heads, batch=2):
    torch.manual_seed(length)
    q = torch.randn(batch, heads, length, WIDTH, requires_grad=True)
    k = torch.randn(batch, kv_heads, length, WIDTH, requires_grad=True)
    v = torch.randn(batch, kv_heads, length, WIDTH, requires_grad=True)
    return q, k, v


def results(option, plan, q, k, v):
    """The output and the gradients of q, k, v."""
    out = option(q, k, v, plan, 0.0)
    weights = torch.linspace(-1, 1, out.numel()).view_as(out)
    return [out, *torch.autograd.grad((out * weights).sum(), (q, k, v))]


def assert_close(found, wanted, length):
    """Float32 sums of WIDTH + length products, in another order, twice (forward, backward): that many roundings at
    most, each of half a unit in the last place of the largest number."""
    for one, other in zip(found, wanted, strict=True):
        roundings = 2 * (WIDTH + length)
        most = roundings * torch.finfo(torch.float32).eps / 2 * max(1.0, other.abs().max().item())
        assert (one - other).abs().max().item() <= most


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize(("heads", "kv_heads"), HEADS)
@pytest.mark.parametrize("name", OPTIONS)
def test_options_equal_eager(name, heads, kv_heads, length):
    q, k, v = inputs(length, heads, kv_heads)
    for who in layouts(length):
        wanted = results(Eager(), Eager().plan(who), q, k, v)
        assert_close(results(OPTIONS[name], OPTIONS[name].plan(who), q, k, v), wanted, length)


def test_eager_equals_one_token_at_a_time():
    """The twin itself, against loops that share no code with it."""
    length, heads, kv_heads = 17, 4, 2
    q, k, v = inputs(length, heads, kv_heads)
    for who in layouts(length):
        out = Eager()(q, k, v, Eager().plan(who), 0.0)
        for row, head, place in itertools.product(range(2), range(heads), range(length)):
            seen = [other for other in range(length) if sees(who, row, place, other)]
            keys, values = k[row, head // 2, seen], v[row, head // 2, seen]
            weights = torch.exp(keys @ q[row, head, place] / WIDTH ** 0.5)
            wanted = (weights @ values) / weights.sum()
            assert (out[row, head, place] - wanted).abs().max() < (WIDTH + length) * 1.2e-7 * 4


def sees(who, row, place, other):
    """In words: not the future, not past the window, not another document."""
    if who.causal and other > place:
        return False
    if who.window is not None and abs(place - other) >= who.window:
        return False
    return who.documents is None or who.documents[row, place].item() == who.documents[row, other].item()


@pytest.mark.parametrize("length", LENGTHS)
def test_mask_tells_who_sees_whom(length):
    for who in layouts(length):
        table = mask(who)
        for row, place, other in itertools.product(range(2), range(0, length, 7), range(length)):
            seen = True if table is None else bool(table[row % len(table), 0, place, other])
            assert seen == sees(who, row, place, other)


def test_block_rule_equals_mask():
    """flex_attention is told who sees whom by a function; a CPU never runs it, so its truth is checked here."""
    length = 17
    batch, head, row, column = (torch.arange(n) for n in (2, 1, length, length))
    grid = torch.meshgrid(batch, head, row, column, indexing="ij")
    for who in layouts(length):
        table = mask(who)
        told = may_look(who.causal, who.window, who.documents)(*grid)
        assert torch.equal(told, torch.ones_like(told) if table is None else table.expand_as(told))


@pytest.mark.parametrize("name", ["eager", *OPTIONS])
@pytest.mark.parametrize("documents", [False, True])
def test_nothing_leaks_from_the_future(name, documents):
    """A later token changes no bit of an earlier result; a token does change its own."""
    option = {"eager": Eager(), **OPTIONS}[name]
    length, changed = 17, 9
    who = layout(length, documents=torch.zeros(2, length, dtype=torch.int32) if documents else None)
    q, k, v = (tensor.detach() for tensor in inputs(length, 4, 2))
    before = option(q, k, v, option.plan(who), 0.0)
    k[:, :, changed] += 1
    v[:, :, changed] += 1
    after = option(q, k, v, option.plan(who), 0.0)
    assert torch.equal(before[:, :, :changed], after[:, :, :changed])
    assert (before[:, :, changed] != after[:, :, changed]).any(dim=-1).all()


@pytest.mark.parametrize("name", ["eager", *OPTIONS])
def test_dropout_scales_what_it_keeps(name):
    """The mean over many draws is the result without dropout; two draws differ; the seed decides."""
    option = {"eager": Eager(), **OPTIONS}[name]
    q, k, v = (tensor.detach().expand(400, -1, -1, -1) for tensor in inputs(5, 2, 2, batch=1))
    plan = option.plan(layout(5))
    torch.manual_seed(0)
    drawn = option(q, k, v, plan, 0.5)
    assert not torch.equal(drawn[0], drawn[1])
    torch.manual_seed(0)
    assert torch.equal(drawn, option(q, k, v, plan, 0.5))
    spread = drawn.std(0) / 400 ** 0.5
    assert ((drawn.mean(0) - option(q, k, v, plan, 0.0)[0]).abs() <= 5 * spread + 1e-6).all()


def test_a_stored_mask_is_the_made_one_and_is_kept():
    """Longer rows after shorter ones, and shorter after longer."""
    for length in (5, 9, 3):
        for who in layouts(length):
            made, stored = mask(who), stored_mask(who)
            assert (made is None) == (stored is None) and (made is None or torch.equal(made, stored))
    one, other = stored_mask(layout(9)), stored_mask(layout(4))
    assert one.data_ptr() == other.data_ptr() and mask(layout(9)).data_ptr() != one.data_ptr()
