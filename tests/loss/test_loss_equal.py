"""loss=chunked and loss=inplace give the sum and the gradients of loss=plain.

Tolerance: the same rows are computed by the same kernels, but sums over chunks (the total, the head's gradient) add in
another order: at most about (rows + chunks) * u of the sum of magnitudes, u = 2**-24 in float32.
"""

import pytest
import torch
import torch.nn.functional as F

from forge.batch import IGNORED
from forge.loss.chunked import Chunked
from forge.loss.inplace import Inplace
from forge.loss.plain import Plain

ROWS, WIDTH, VOCABULARY = 29, 8, 37
UNIT = 2.0**-24


def _inputs(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(ROWS, WIDTH, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(VOCABULARY, WIDTH, generator=generator).to(dtype).requires_grad_()
    targets = torch.randint(VOCABULARY, (ROWS,), generator=generator)
    targets[::5] = IGNORED
    return hidden, weight, targets


def _results(loss, hidden, weight, targets):
    scaled, total = loss(hidden, weight, targets, torch.tensor(0.25))
    scaled.backward()
    assert not total.requires_grad
    return scaled.detach(), total, hidden.grad, weight.grad


@pytest.mark.parametrize("chunk_tokens", [1, 4, 28, ROWS, 1000])
def test_chunked_equals_plain(chunk_tokens):
    plain = _results(Plain(1), *_inputs())
    chunked = _results(Chunked(chunk_tokens, 1), *_inputs())
    for one, other in zip(plain, chunked, strict=True):
        assert (one - other).norm() <= 2 * ROWS * UNIT * one.norm()


@pytest.mark.parametrize("loss", [Plain(1), Chunked(7, 1), Inplace(1)], ids=["plain", "chunked", "inplace"])
def test_counts_only_targets(loss):
    hidden, weight, targets = _inputs()
    scaled, total = loss(hidden, weight, targets, torch.tensor(0.25))
    kept = targets != IGNORED
    expected = -(hidden @ weight.T).log_softmax(-1)[kept, targets[kept]].sum()
    assert torch.allclose(total, expected, rtol=1e-6)
    assert torch.equal(scaled, total * 0.25)


@pytest.mark.parametrize("loss", [Plain(1), Chunked(7, 1), Inplace(1)], ids=["plain", "chunked", "inplace"])
def test_nothing_to_predict_is_zero_and_has_a_zero_gradient(loss):
    hidden, weight, targets = _inputs()
    scaled, _, *grads = _results(loss, hidden, weight, torch.full_like(targets, IGNORED))
    assert scaled == 0 and all(torch.count_nonzero(grad) == 0 for grad in grads)


@pytest.mark.parametrize("loss", [Plain(1), Chunked(7, 1), Inplace(1)], ids=["plain", "chunked", "inplace"])
def test_bfloat16_hidden_states_are_summed_in_float32(loss):
    hidden, weight, targets = _inputs(torch.bfloat16)
    scaled, total, hidden_grad, _ = _results(loss, hidden, weight, targets)
    logits = F.linear(hidden, weight).detach().float()
    exact = F.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="sum")
    assert total.dtype == scaled.dtype == torch.float32 and hidden_grad.dtype == torch.bfloat16
    assert abs(total - exact) <= 2 * ROWS * UNIT * exact


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_inplace_equals_plain(dtype):
    plain, inplace = (_results(loss, *_inputs(dtype)) for loss in (Plain(1), Inplace(1)))
    unit = UNIT if dtype is torch.float32 else 2.0**-53
    for one, other in zip(plain, inplace, strict=True):
        assert (one - other).norm() <= 2 * ROWS * unit * one.norm()


def test_inplace_keeps_one_tensor_of_logits():
    logits = 4 * ROWS * VOCABULARY
    assert logits < _saved_bytes(Inplace(1)) < 2 * logits


def test_the_gradient_of_inplace_follows_what_comes_after_the_loss():
    hidden, weight, targets = _inputs(torch.float64)
    scaled, _ = Inplace(1)(hidden, weight, targets, torch.tensor(0.5, dtype=torch.float64))
    (3 * scaled).backward()
    wanted, *_ = _inputs(torch.float64)
    (1.5 * Plain(1)(wanted, weight.detach(), targets, torch.tensor(1.0))[0]).backward()
    torch.testing.assert_close(hidden.grad, wanted.grad)


@pytest.mark.parametrize("loss", [Plain(1), Chunked(5, 1), Inplace(1)])
def test_the_rows_that_fill_the_last_tile_change_nothing(loss, monkeypatch):
    """What is done on a GPU, done here: equal but for the order of the products' sums."""
    without = _results(loss, *_inputs())
    for module in ("cross_entropy", "overwriting"):
        monkeypatch.setattr(f"forge.loss.{module}.missing_rows", lambda vocabulary, pad_to, device: -vocabulary % 64)
    for got, wanted in zip(_results(loss, *_inputs()), without, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-6)


def _saved_bytes(loss):
    """What autograd keeps between forward and backward, inputs included."""
    storages = {}

    def keep(tensor):
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        total, _ = loss(*_inputs(), torch.tensor(1.0))
    assert total.requires_grad      # and so the graph, and what it keeps, is still there
    return sum(storages.values())


def test_chunked_keeps_no_logits():
    logits = 4 * ROWS * VOCABULARY
    assert _saved_bytes(Plain(1)) > logits
    assert _saved_bytes(Chunked(4, 1)) < 4 * (ROWS + VOCABULARY) * WIDTH + 16 * ROWS + 64


def test_settings_must_be_positive():
    assert list(Chunked(0, 1).problems(None)) == ["loss.chunk_tokens=0: at least 1 is wanted."]
    for loss in (Plain(0), Inplace(0), Chunked(1, 0)):
        assert list(loss.problems(None)) == ["loss.pad_to=0: at least 1 is wanted."]
