"""The gate's product from bfloat16 parts, against float64. Here the parts' products are taken in float32, as tensor
cores take them; tests/gpu/test_routers.py runs it on those."""

import pytest
import torch

from forge.moe_router.exact import _parts, plain_product, split_product

UNIT = 2.0**-24


def _inputs(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, 11, 40, generator=generator).bfloat16().requires_grad_()
    weight = torch.randn(7, 40, generator=generator).to(dtype).requires_grad_()
    return x, weight, torch.randn(3, 11, 7, generator=generator)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_as_exact_as_float32(dtype):
    """Sums of 40 (of x's gradient 7, of the weight's 33) products: at most n roundings of the sum of magnitudes."""
    x, weight, grad = _inputs(dtype)
    found, plain, exact = split_product(x, weight), plain_product(x, weight), x.double() @ weight.double().T
    magnitude = x.double().abs() @ weight.double().abs().T
    assert ((found - exact).abs() <= 40 * UNIT * magnitude).all()
    assert (found - exact).norm() <= 2 * (plain - exact).norm() + UNIT * exact.norm()
    x_grad, weight_grad = torch.autograd.grad(found, (x, weight), grad)
    wanted = grad.double() @ weight.double()
    assert (x_grad - wanted).norm() <= (2**-9 + 2**-15) * wanted.norm()
    wanted = grad.double().flatten(0, 1).T @ x.double().flatten(0, 1)
    assert (weight_grad - wanted).norm() <= (33 * UNIT + (2**-9 if dtype == torch.bfloat16 else 0)) * wanted.norm()
    assert x_grad.dtype == x.dtype and weight_grad.dtype == dtype


def test_three_parts_are_the_whole():
    weight = torch.randn(1000, generator=torch.Generator().manual_seed(0)) * torch.logspace(-20, 20, 1000)
    parts = _parts(weight, 3)
    assert torch.equal(sum(part.double() for part in parts), weight.double())
    assert not torch.equal(sum(part.double() for part in parts[:2]), weight.double())


def test_compiled_it_is_as_exact():
    """With the second part left out, the error is that of a product in bfloat16, 2**-9 of it."""
    x, weight, grad = _inputs()
    exact = x.double() @ weight.double().T
    found = torch.compile(split_product, fullgraph=True)(x, weight)
    assert (found - exact).norm() <= 40 * UNIT * exact.norm()
    wanted = grad.double().flatten(0, 1).T @ x.double().flatten(0, 1)
    assert (torch.autograd.grad(found, weight, grad)[0] - wanted).norm() <= 33 * UNIT * wanted.norm()
