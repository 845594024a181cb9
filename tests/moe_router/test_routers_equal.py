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


def _routing(top_k, num_experts=EXPERTS, normalize=True, aux_scope="sequence", **more):
    return routing(num_experts=num_experts, top_k=top_k, normalize=normalize, aux_loss=0.3, aux_scope=aux_scope,
                   z_loss=0.1, **more)


def _results(router, routing, x, valid, edit=None, hidden=HIDDEN):
    torch.manual_seed(0)
    mixture = router.build(x.shape[-1], hidden, routing)
    if edit:
        with torch.no_grad():
            edit(mixture)
    mixture.to(x.dtype)
    x = x.clone().requires_grad_()
    torch.manual_seed(1)
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
    empty = results["load"][1] == 0
    assert empty.any()
    assert torch.count_nonzero(results["gate_up"][empty]) == 0 and torch.count_nonzero(results["down"][empty]) == 0


@ROUTERS
def test_all_tokens_to_one_expert(router):
    x = _x().abs()

    def edit(mixture):
        mixture.gate.weight.zero_()
        mixture.gate.weight[3] = 1.0

    results = _assert_equal(router, _routing(1), x, edit=edit)
    assert results["load"].tolist() == [[0, 0, 0, 14, 0]] * 2


@ROUTERS
def test_ties(router):
    results = _assert_equal(router, _routing(2), _x(), edit=lambda mixture: mixture.gate.weight.zero_())
    assert results["load"].tolist() == [[14, 14, 0, 0, 0]] * 2


@ROUTERS
def test_padding(router):
    valid = torch.arange(7).expand(2, 7) < torch.tensor([[7], [3]])
    results = _assert_equal(router, _routing(2), _x(), valid)
    assert results["load"].sum(1).tolist() == [2 * 10, 2 * 14]


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
    assert caplog.messages == ["moe_router=fused has kernels for NVIDIA GPUs since Volta only: this run takes "
                               "moe_router=sorted, which computes the same."]


SETTINGS = {
    "softmax of chosen": {"score": "softmax_of_chosen"}, "sigmoid": {"score": "sigmoid", "scale": 2.5},
    "groups": {"score": "sigmoid", "num_experts": 6, "num_groups": 3, "top_groups": 1}, "shared": {"shared_hidden": 7},
    "jitter": {"jitter": 0.3}, "bias": {"balance": "bias"}, "drop": {"capacity_factor": 0.6},
    "drop all": {"capacity_factor": 1e-3}, "global batch": {"aux_scope": "global_batch"},
    "overflow": {"balance": "overflow", "balance_ramp": 0, "threshold": 1.01},
    "all": {"score": "sigmoid", "num_experts": 6, "num_groups": 3, "top_groups": 2, "shared_hidden": 7, "jitter": 0.3,
            "balance": "overflow", "balance_ramp": 0, "threshold": 1.01, "aux_scope": "global_batch", "scale": 0.5}}


def _biased(mixture):
    mixture.bias.copy_(torch.linspace(-0.2, 0.2, len(mixture.bias)))
    mixture.load_so_far.copy_(torch.arange(len(mixture.load_so_far)))


@ROUTERS
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_every_setting(router, settings):
    valid = torch.arange(7).expand(2, 7) < torch.tensor([[7], [5]])
    results = _assert_equal(router, _routing(2, **settings), _x(), valid, _biased)
    chosen, computed = results["load"][:2]
    assert chosen.sum() == 12 * 2 and (computed.sum() == 14 * 2) != bool(settings.get("capacity_factor"))
    assert len(results["load"]) == (3 if "aux_scope" in settings else 2)
    if settings.get("capacity_factor") == 1e-3:                 # of each expert one is left
        assert computed.max() == 1 and torch.count_nonzero(results["y"].any(dim=-1)) <= EXPERTS


WITH_IT = {"num_groups": ("top_groups",), "balance": ("threshold", "balance_ramp")}


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_every_setting_has_an_effect(settings):
    """Against a run that differs in it alone."""
    def run(settings, edit=_biased):
        results = _results(Loop(), _routing(2, **settings), _x(), valid, edit)
        return results["aux"], results["y"]

    valid = torch.arange(7).expand(2, 7) < torch.tensor([[7], [5]])
    names = settings.keys() - {"num_experts", *(name for names in WITH_IT.values() for name in names)}
    for name in names:
        if settings[name] == "bias":                            # what it does to a pass is done by the biases alone
            assert not torch.equal(run(settings)[1], run(settings, None)[1])
            continue
        others = {key: value for key, value in settings.items() if key not in (name, *WITH_IT.get(name, ()))}
        which = 0 if name == "aux_scope" else 1
        assert not torch.equal(run(settings)[which], run(others)[which]), name


@pytest.mark.parametrize("router", [Loop(), Sorted(), Fused()], ids=["loop", "sorted", "fused"])
@pytest.mark.parametrize("shape", [(0, 7), (2, 0)], ids=str)
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_no_tokens(router, shape, settings):
    for dtype in (torch.float32, torch.bfloat16):
        results = _results(router, _routing(2, **settings), torch.zeros(*shape, 16, dtype=dtype), None, hidden=16)
        assert results["y"].shape == (*shape, 16) and results["aux"] == 0 and results["load"][:2].sum() == 0
        assert all(torch.count_nonzero(results[name]) == 0 for name in ("gate_up", "down", "gate.weight"))


def _poison(monkeypatch):
    """Memory that torch leaves as it was holds nan."""
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    torch.use_deterministic_algorithms(True, warn_only=True)


@ROUTERS
@pytest.mark.parametrize("factor", [1e-3, 0.3, 0.6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_that_nobody_computes_may_hold_anything(router, dtype, factor, monkeypatch):
    """grouped_mm leaves rows past the last expert's as the memory was: here nan, in two steps."""
    how, x = _routing(2, capacity_factor=factor), _x(width=16).to(dtype)
    wanted = _results(Loop(), how, x, None, hidden=16)
    _poison(monkeypatch)
    try:
        assert torch.empty(3).isnan().all()
        for _ in range(2):
            found = _results(router, how, x, None, hidden=16)
            for name, value in wanted.items():
                assert found[name].isfinite().all(), name
                unit = 2**-9 if dtype == torch.bfloat16 else 100 * UNIT
                assert (found[name] - value).norm() <= 4 * unit * value.norm(), name
    finally:
        torch.use_deterministic_algorithms(False)


@ROUTERS
def test_what_a_dropped_choice_weighs_reaches_nothing(router):
    """Its weight may be anything, and gets no gradient."""
    tokens, weights = torch.randn(4, 8), torch.full((4, 2), torch.nan)
    weights[:, 0] = 0.5
    weights.requires_grad_()
    experts = torch.tensor([[0, 3], [1, 3], [2, 3], [0, 3]])
    mixture = router.build(8, 8, _routing(2, num_experts=3))
    y = mixture.execute(tokens, experts, weights, mixture.gate_up, mixture.down)
    y.sum().backward()
    assert y.isfinite().all() and torch.count_nonzero(weights.grad[:, 1]) == 0 and weights.grad.isfinite().all()


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_one_graph_without_a_break(settings):
    """torch.compile of the sorted router, and what it gives, operator by operator, is the same."""
    torch._dynamo.reset()
    how, x = _routing(2, **settings), _x()
    mixture = Sorted().build(WIDTH, HIDDEN, how)
    with torch.no_grad():
        _biased(mixture)
    torch.manual_seed(1)
    wanted = mixture(x, None)
    compiled = torch.compile(mixture, backend="aot_eager", fullgraph=True)
    torch.manual_seed(1)
    for one, other in zip(wanted, compiled(x, None), strict=True):
        assert torch.equal(one, other)
    torch.autograd.backward(compiled(x, None)[:2], [x, None])
    assert all(parameter.grad is not None for parameter in mixture.parameters())


DIFFERENTIABLE = {
    "softmax": {}, "not normalized": {"normalize": False}, "softmax of chosen": {"score": "softmax_of_chosen"},
    "sigmoid": {"score": "sigmoid"}, "sigmoid, not normalized": {"score": "sigmoid", "normalize": False, "scale": 1.5},
    "shared": {"shared_hidden": 2}, "global batch": {"aux_scope": "global_batch"}, "drop": {"capacity_factor": 0.7},
    "groups": {"num_experts": 4, "num_groups": 2, "top_groups": 1, "score": "sigmoid"},
    "overflow": {"balance": "overflow", "balance_ramp": 0, "threshold": 1.01}}


@pytest.mark.parametrize("settings", DIFFERENTIABLE.values(), ids=DIFFERENTIABLE)
@pytest.mark.parametrize("router", [Loop(), Sorted()], ids=["loop", "sorted"])
def test_gradients_are_those_of_finite_differences(router, settings):
    torch.manual_seed(0)
    mixture = router.build(4, 3, _routing(2, **{"num_experts": 3, **settings})).double()
    names = [name for name, _ in mixture.named_parameters()]

    def run(x, *parameters):
        y, aux, _ = torch.func.functional_call(mixture, dict(zip(names, parameters, strict=True)), (x, None))
        return y, aux

    x = _x(2, 2, 4).double().requires_grad_()
    assert torch.autograd.gradcheck(run, (x, *(p.detach().requires_grad_() for p in mixture.parameters())))
