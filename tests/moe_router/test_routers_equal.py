"""Every router equals moe_router=loop: output, aux, load, and the gradient of x and of every parameter.

Tolerance: all compute the same sums, of n terms in some order (n at most tokens, or width, or 2 * hidden), and so
differ by at most about n * u of the sum of magnitudes; u = 2**-24 in float32. Load is a count, and exact.
"""

import pytest
import torch
from routings import routing

from forge import notes
from forge.moe_router.fused import Fused
from forge.moe_router.loop import Loop
from forge.moe_router.sorted import Sorted

UNIT = 2.0**-24
WIDTH, HIDDEN, EXPERTS = 12, 20, 5


def _routing(top_k, num_experts=EXPERTS, normalize=True, aux_scope="sequence"):
    return routing(num_experts=num_experts, top_k=top_k, normalize=normalize, aux_loss=0.3, aux_scope=aux_scope,
                   z_loss=0.1)


def _results(router, routing, x, valid, edit=None, hidden=HIDDEN):
    torch.manual_seed(0)
    mixture = router.build(x.shape[-1], hidden, routing)
    if edit:
        with torch.no_grad():
            edit(mixture)
    mixture.to(x.dtype)
    x = x.clone().requires_grad_()
    y, aux, load = mixture(x, valid)
    torch.autograd.backward([y, aux], [torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y), None])
    assert not load.requires_grad
    return {"y": y.detach(), "aux": aux.detach(), "x": x.grad, "load": load,
            **{name: parameter.grad for name, parameter in mixture.named_parameters()}}


def _assert_equal(router, routing, x, valid=None, edit=None, hidden=HIDDEN):
    one, other = (_results(option, routing, x, valid, edit, hidden) for option in (Loop(), router))
    tolerance = 4 * max(x.shape[0] * x.shape[1] * routing.top_k, 2 * hidden, WIDTH) * UNIT
    for name, wanted in one.items():
        assert wanted is not None and other[name].shape == wanted.shape, name
        assert (other[name] - wanted).norm() <= tolerance * wanted.norm(), name
    assert torch.equal(one["load"], other["load"])
    return one


def _x(batch=2, length=7, width=WIDTH):
    return torch.randn(batch, length, width, generator=torch.Generator().manual_seed(3))


ROUTERS = pytest.mark.parametrize("router", [Sorted(), Fused()], ids=["sorted", "fused"])


@ROUTERS
@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("top_k", range(1, EXPERTS + 1))
def test_every_top_k(router, top_k, normalize):
    _assert_equal(router, _routing(top_k, normalize=normalize), _x())


@ROUTERS
@pytest.mark.parametrize("scope", ["sequence", "batch"])
@pytest.mark.parametrize("shape", [(1, 1), (1, 2), (3, 1), (3, 11)], ids=str)
def test_odd_shapes(router, shape, scope):
    _assert_equal(router, _routing(2, aux_scope=scope), _x(*shape))


@ROUTERS
def test_many_experts_with_few_tokens(router):
    results = _assert_equal(router, _routing(2, num_experts=32), _x(1, 3))
    assert (results["load"] == 0).any()
    empty = results["load"] == 0
    assert torch.count_nonzero(results["gate_up"][empty]) == 0 and torch.count_nonzero(results["down"][empty]) == 0


@ROUTERS
def test_all_tokens_to_one_expert(router):
    x = _x().abs()

    def edit(mixture):
        mixture.gate.weight.zero_()
        mixture.gate.weight[3] = 1.0

    results = _assert_equal(router, _routing(1), x, edit=edit)
    assert results["load"].tolist() == [0, 0, 0, 14, 0]


@ROUTERS
def test_ties(router):
    results = _assert_equal(router, _routing(2), _x(), edit=lambda mixture: mixture.gate.weight.zero_())
    assert results["load"].tolist() == [14, 14, 0, 0, 0]


@ROUTERS
def test_padding(router):
    valid = torch.arange(7).expand(2, 7) < torch.tensor([[7], [3]])
    results = _assert_equal(router, _routing(2), _x(), valid)
    assert results["load"].sum() == 2 * 10


@ROUTERS
def test_bfloat16_agrees_within_bfloat16(router):
    """Each output is rounded to bfloat16 (2**-9) after each of three products."""
    one, other = (_results(option, _routing(2), _x().bfloat16(), None) for option in (Loop(), router))
    assert all((other[name] - one[name]).norm() <= 4 * 2**-9 * one[name].norm() for name in one)
    assert other["y"].dtype == torch.bfloat16 and other["aux"].dtype == torch.float32


@pytest.mark.parametrize("router", [Loop(), Sorted()], ids=["loop", "sorted"])
def test_autocast_chooses_the_dtype_of_the_experts(router):
    mixture = router.build(WIDTH * 2, HIDDEN * 2, _routing(2))
    with torch.autocast("cpu", torch.bfloat16):
        y, _, _ = mixture(_x(width=WIDTH * 2), None)
    assert y.dtype == torch.bfloat16


def test_sorted_repeats_its_bits():
    one, other = (_results(Sorted(), _routing(3), _x(3, 11), None) for _ in range(2))
    assert all(torch.equal(one[name], other[name]) for name in one)


@ROUTERS
def test_widths_and_dtypes_without_a_grouped_kernel(router):
    x = _x(width=10)
    _assert_equal(router, _routing(2), x.bfloat16().float())
    one, other = (_results(option, _routing(2), x.double(), None) for option in (Loop(), router))
    assert all((other[name] - one[name]).norm() <= 4 * 40 * 2.0**-53 * one[name].norm() for name in one)


def test_fused_says_once_that_it_is_sorted_here(caplog, monkeypatch):
    monkeypatch.setattr(notes, "_said", set())
    for _ in range(2):
        _results(Fused(), _routing(2), _x(), None)
    assert caplog.messages == ["moe_router=fused has kernels for a GPU only: on cpu it computes what "
                               "moe_router=sorted does."]


@pytest.mark.parametrize("router", [Loop(), Sorted()], ids=["loop", "sorted"])
def test_gradients_are_those_of_finite_differences(router):
    torch.manual_seed(0)
    mixture = router.build(4, 3, _routing(2, num_experts=3)).double()
    names = [name for name, _ in mixture.named_parameters()]

    def run(x, *parameters):
        y, aux, _ = torch.func.functional_call(mixture, dict(zip(names, parameters, strict=True)), (x, None))
        return y, aux

    x = _x(2, 2, 4).double().requires_grad_()
    assert torch.autograd.gradcheck(run, (x, *(p.detach().requires_grad_() for p in mixture.parameters())))
