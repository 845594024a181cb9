"""operators=native computes what operators=handwritten spells out: results and every gradient.

Tolerance: both sum n terms in some order, so they differ by at most about n * u relative to the sum of magnitudes
(u: unit roundoff, 2**-24 in float32, 2**-53 in float64), n being the longest sum. erf and tanh add a few u.
"""

import pytest
import torch
from torch import nn

from forge.operators.fused import Fused
from forge.operators.handwritten import Handwritten
from forge.operators.native import Native

UNIT = {torch.float32: 2.0**-24, torch.float64: 2.0**-53}
DTYPES = list(UNIT)


def _results(layer: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    x = x.clone().requires_grad_()
    y = layer(x)
    y.backward(torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y))
    return [y.detach(), x.grad, *(p.grad for p in layer.parameters())]


def _assert_equal(native: nn.Module, handwritten: nn.Module, x: torch.Tensor, terms: int) -> None:
    generator = torch.Generator().manual_seed(1)
    for parameter in native.parameters():
        nn.init.normal_(parameter, std=0.5, generator=generator)
    handwritten.load_state_dict(native.state_dict())        # fails unless the names agree
    tolerance = 4 * terms * UNIT[x.dtype]
    for one, other in zip(_results(native, x), _results(handwritten, x), strict=True):
        assert one.dtype == other.dtype
        assert (one - other).norm() <= tolerance * one.norm()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", ["rms", "layer"])
@pytest.mark.parametrize("shape", [(3, 5, 32), (1, 3), (2, 7, 13)], ids=str)
def test_norms(kind, shape, dtype):
    x = torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(0)) * 3 + 1
    layers = [option.norm(shape[-1], kind, 1e-5).to(dtype) for option in (Native(), Handwritten())]
    _assert_equal(*layers, x, terms=x.numel())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("activation", ["swiglu", "gelu", "gelu_tanh", "gelu_tanh_norm"])
def test_feed_forward(activation, bias, dtype):
    x = torch.randn(2, 5, 12, dtype=dtype, generator=torch.Generator().manual_seed(0)) * 3
    layers = [option.feed_forward(12, 20, activation, bias).to(dtype) for option in (Native(), Handwritten())]
    _assert_equal(*layers, x, terms=20)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("activation", ["swiglu", "gelu", "gelu_tanh", "gelu_tanh_norm"])
def test_fused_feed_forward(activation, bias, dtype):
    x = torch.randn(2, 5, 12, dtype=dtype, generator=torch.Generator().manual_seed(0)) * 3
    layers = [option.feed_forward(12, 20, activation, bias).to(dtype) for option in (Fused(), Handwritten())]
    _assert_equal(*layers, x, terms=20)


@pytest.mark.parametrize("activation", ["gelu_tanh", "gelu_tanh_norm"])
@pytest.mark.parametrize("bias", [True, False])
def test_the_derivative_that_fused_writes_out_is_the_derivative(bias, activation):
    layer = Fused().feed_forward(6, 10, activation, bias).double()
    x = torch.randn(2, 3, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0), requires_grad=True)
    names, weights = zip(*layer.named_parameters(), strict=True)

    def function(x, *weights):
        return torch.func.functional_call(layer, dict(zip(names, weights, strict=True)), (x,))

    assert torch.autograd.gradcheck(function, (x, *weights))


def test_fused_says_which_activations_it_does_not_know(caplog, monkeypatch):
    monkeypatch.setattr("forge.notes._said", set())
    Fused().feed_forward(4, 8, "swiglu", bias=False)
    assert caplog.messages == ["operators=fused has no kernel for swiglu: this model's runs as with operators=native."]


def test_large_inputs_stay_finite():
    """A textbook exponential would overflow here, and its gradient would be nan."""
    for activation in ("swiglu", "gelu", "gelu_tanh"):
        layer = Handwritten().feed_forward(4, 8, activation, bias=False)
        assert all(result.isfinite().all() for result in _results(layer, torch.full((2, 4), -1e3)))


def test_parameters_have_the_names_and_shapes_of_the_protocol():
    layer = Native().feed_forward(4, 6, "swiglu", bias=True)
    assert {name: tuple(p.shape) for name, p in layer.named_parameters()} == {
        "up.weight": (12, 4), "up.bias": (12,), "down.weight": (4, 6), "down.bias": (4,)}
    assert [name for name, _ in Native().norm(4, "rms", 1e-5).named_parameters()] == ["weight"]
    assert [name for name, _ in Native().norm(4, "layer", 1e-5).named_parameters()] == ["weight", "bias"]
