"""moe_router=sonic: what the package is told. The package runs on a GPU only; a stand-in with its signature computes
the plain result out of exactly what it was told, in the layout that it documents."""

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from conftest import composed
from routings import routing

from forge.config import check, realise
from forge.errors import ConfigError, Exit, UnusableEnvironment
from forge.moe_router import by_sonic, sonic
from forge.moe_router.loop import Loop
from forge.moe_router.sonic import Sonic

WIDTH, HIDDEN = 24, 16


def plain_sonic(told):
    """moe_general_routing_inputs of sonic-moe 0.1.2.post1, as its comments describe it, in plain PyTorch."""
    def moe_general_routing_inputs(     # noqa: PLR0913
            x, router_scores, token_indices, expert_indices, w1, b1, w2, b2, E, stream_id, activation_type,
            is_inference_mode_enabled=False, concat_layout=False):
        told.append({"w1": w1, "w2": w2, "inference": is_inference_mode_enabled})
        assert b1 is None and b2 is None and activation_type == "swiglu" and w2.shape[-1] == E
        assert token_indices.dtype == expert_indices.dtype == torch.int32 and router_scores.dtype == torch.float32
        assert (token_indices.diff() >= 0).all() and 0 <= int(expert_indices.min()) <= int(expert_indices.max()) < E
        assert w1.shape[:2] == (2 * w2.shape[1], x.shape[1]) and w2.shape[0] == x.shape[1]
        for weight in (w1, w2):     # "stride order (2, 0, 1)": experts outermost, then rows, then columns
            assert weight.permute(2, 0, 1).is_contiguous()
        out = torch.zeros_like(x)
        for score, token, expert in zip(router_scores, token_indices.long(), expert_indices.long(), strict=True):
            h = w1[..., expert] @ x[token]
            gate, up = h.chunk(2) if concat_layout else (h[::2], h[1::2])
            out = out.index_add(0, token[None], (score * (w2[..., expert] @ (F.silu(gate) * up)))[None])
        return out, torch.bincount(expert_indices.long(), minlength=E)
    return moe_general_routing_inputs


@pytest.fixture
def told(monkeypatch):
    """What the stand-in was told. It takes the place of the device and of the number format as well."""
    calls = []
    package = ModuleType("sonicmoe")
    package.moe_general_routing_inputs = plain_sonic(calls)
    enums = SimpleNamespace(ActivationType=SimpleNamespace(SWIGLU="swiglu"))
    package.__spec__ = SimpleNamespace()
    monkeypatch.setitem(sys.modules, "sonicmoe", package)
    monkeypatch.setitem(sys.modules, "sonicmoe.enums", enums)
    monkeypatch.setattr(by_sonic, "check_device", lambda device: None)
    monkeypatch.setattr(by_sonic, "FORMATS", (torch.float32,))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=0))
    by_sonic._package.cache_clear()
    yield calls
    by_sonic._package.cache_clear()


def results(router, how, x):
    torch.manual_seed(0)
    mixture = router.build(WIDTH, HIDDEN, how)
    x = x.clone().requires_grad_()
    y, _, load = mixture(x, None)
    y.backward(torch.linspace(-1, 1, y.numel()).view_as(y))
    return {"y": y.detach(), "x": x.grad, "load": load, **{name: p.grad for name, p in mixture.named_parameters()}}


@pytest.mark.parametrize("changes", [{}, {"top_k": 1}, {"top_k": 4, "normalize": True}, {"capacity_factor": 1.0},
                                     {"score": "sigmoid", "scale": 2.5}], ids=str)
def test_what_the_package_is_told_gives_the_loop_s_result(told, changes):
    """Sums of at most n = tokens * top_k terms in two orders: n roundings of float32 apart, forward and backward."""
    how, x = routing(**{"top_k": 2, **changes}), torch.randn(2, 9, WIDTH, generator=torch.Generator().manual_seed(1))
    ours, plain = results(Sonic(), how, x), results(Loop(), how, x)
    for name, wanted in plain.items():
        assert (ours[name] - wanted).norm() <= 4 * 18 * how.top_k * 2**-24 * wanted.norm(), name
    assert len(told) == 1 and not told[0]["inference"]


def test_weights_are_viewed_and_not_copied(told):
    mixture = Sonic().build(WIDTH, HIDDEN, routing())
    with torch.no_grad():
        mixture(torch.randn(1, 3, WIDTH), None)
    assert told[0]["w1"].data_ptr() == mixture.gate_up.data_ptr()
    assert told[0]["w2"].data_ptr() == mixture.down.data_ptr() and told[0]["inference"]


def test_no_tokens(told):
    assert Sonic().build(WIDTH, HIDDEN, routing())(torch.randn(1, 0, WIDTH), None)[0].shape == (1, 0, WIDTH)
    assert not told


def test_without_the_package_a_sentence_says_so(monkeypatch):
    monkeypatch.setitem(sys.modules, "sonicmoe", None)
    by_sonic._package.cache_clear()
    monkeypatch.setattr(by_sonic, "find_spec", lambda name: None)
    with pytest.raises(UnusableEnvironment, match="needs the package sonic-moe, which is not installed") as caught:
        Sonic().build(WIDTH, HIDDEN, routing())(torch.randn(1, 3, WIDTH), None)
    assert caught.value.exit_code == Exit.ENVIRONMENT


def test_another_version_of_the_package_is_refused(told):
    sys.modules["sonicmoe"].moe_general_routing_inputs = lambda x, is_concatenated_gate_up: None
    with pytest.raises(UnusableEnvironment, match=r"needs sonic-moe 0\.1\.2\.post1"):
        Sonic().build(WIDTH, HIDDEN, routing())(torch.randn(1, 3, WIDTH), None)


def test_a_device_that_it_has_no_kernels_for_is_refused():
    with pytest.raises(UnusableEnvironment, match="Hopper GPUs and later only, and this run is on cpu"):
        by_sonic.check_device(torch.device("cpu"))


def test_float32_is_refused(told, monkeypatch):
    monkeypatch.setattr(by_sonic, "FORMATS", (torch.bfloat16, torch.float16))
    with pytest.raises(ConfigError, match="bfloat16 or float16, and this run in float32: set precision=bf16"):
        Sonic().build(WIDTH, HIDDEN, routing())(torch.randn(1, 3, WIDTH), None)


def test_a_run_is_told_before_any_device_is_touched(monkeypatch):
    """The parent process checks, and a model without experts needs no package."""
    monkeypatch.setattr(sonic, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="needs the package sonic-moe, which is not installed"):
        check(realise(composed("moe_router=sonic", "run_dir=x")))
    check(realise(composed("moe_router=sonic", "model=gpt2_124m", "run_dir=x")))


def test_with_the_package_nothing_is_said(told):
    check(realise(composed("moe_router=sonic", "run_dir=x")))


@pytest.mark.parametrize(("words", "said"), [
    (["compile=blocks", "compile.fullgraph=true"], "set compile.fullgraph=false"),
    (["model.hidden=36"], "model.hidden=36: moe_router=sonic reads rows of 16 bytes: make it a multiple of 8")])
def test_what_does_not_fit_is_said(words, said):
    with pytest.raises(ConfigError, match=said):
        check(realise(composed("moe_router=sonic", *words, "run_dir=x")))


def test_compiled_code_leaves_it_alone(told):
    mixture = Sonic().build(WIDTH, HIDDEN, routing())
    x = torch.randn(1, 3, WIDTH)
    plain = mixture(x, None)[0]
    compiled = torch.compile(mixture, backend="eager")
    assert torch.allclose(compiled(x, None)[0], plain, rtol=0, atol=1e-6) and len(told) == 2
