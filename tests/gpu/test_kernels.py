"""forge's own kernels against their plain twins, on the GPU and in the dtypes they are for.

Tolerances: a result rounded to bfloat16 is off by at most 2**-8 of itself; a twin that rounds before its last operation
is off by a rounding more. Norms of differences stay below that of the largest.
"""

from __future__ import annotations

import pytest
import torch
from tiny import tiny_batch, tiny_model

from forge.batch import IGNORED

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
ROUNDING = 2.0**-8


def draw(*shape, dtype=torch.bfloat16, scale=1.0):
    return (torch.randn(*shape, device="cuda") * scale).to(dtype)


def difference(found, wanted):
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("rows", "vocabulary", "columns"), [(64, 50257, 50304), (7, 61, 64), (33, 1000, 1000)])
def test_the_overwriting_cross_entropy(rows, vocabulary, columns, dtype):
    from forge.kernels.cross_entropy import overwrite
    from forge.loss.overwriting import overwrite_plainly

    logits, scale = draw(rows, columns, dtype=dtype, scale=3), torch.tensor(0.37, device="cuda")
    targets = torch.randint(vocabulary, (rows,), device="cuda")
    targets[::3] = IGNORED
    found, wanted = logits.clone(), logits.double()
    losses = overwrite(found, targets, scale, vocabulary)
    exact = overwrite_plainly(wanted, targets, scale, vocabulary)
    assert difference(losses, exact) < 1e-5
    assert difference(found, wanted) < {torch.float32: 1e-5}.get(dtype, ROUNDING)
    assert torch.count_nonzero(found[:, vocabulary:]) == 0 and torch.count_nonzero(found[::3]) == 0


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_products_that_end_in_gelu(dtype, with_bias):
    from forge.kernels import cublaslt
    from forge.operators.epilogues import gelu_gradient_product_plainly, gelu_product_plainly

    x, up, down = draw(384, 96, dtype=dtype), draw(256, 96, dtype=dtype, scale=0.1), draw(96, 256, dtype=dtype)
    bias = draw(256, dtype=dtype) if with_bias else None
    found = cublaslt.gelu_product(x, up, bias)
    exact = gelu_product_plainly(x.double(), up.double(), None if bias is None else bias.double())
    assert all(difference(one, other) < ROUNDING for one, other in zip(found, exact, strict=True))
    pre = found[1]
    gradient = cublaslt.gelu_gradient_product(x, down, pre)
    assert difference(gradient, gelu_gradient_product_plainly(x.double(), down.double(), pre.double())) < ROUNDING


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_gelu_and_the_norm_after_it(dtype):
    from forge.operators.inner_norm import GeluNorm
    from forge.operators.layers import NativeGeluNorm

    layers = [kind(3072, 1e-5).cuda().to(dtype) for kind in (GeluNorm, NativeGeluNorm)]
    exact = NativeGeluNorm(3072, 1e-5).cuda().double()
    h, gradient = draw(1500, 3072, dtype=dtype), draw(1500, 3072, dtype=dtype)
    results = []
    for layer in (*layers, exact):
        x = h.to(layer.weight.dtype).detach().requires_grad_()
        y = layer(x)
        y.backward(gradient.to(y.dtype))
        results.append([y.detach(), x.grad, layer.weight.grad, layer.bias.grad])
    for one, separate, wanted in zip(*results, strict=True):
        assert difference(one, wanted) <= max(2 * difference(separate, wanted), 1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("gates", [12, 12 * 72])
def test_heads_and_their_gate(dtype, gates):
    """With as many gates as heads, and as numbers; in the strides that attention gives; twice less exact than separate
    operators at most."""
    from forge.operators.gate import gated, gated_plainly

    heads = draw(2, 500, 12, 72, dtype=dtype).transpose(1, 2)
    gate, gradient = draw(2, 500, gates, dtype=dtype), draw(2, 500, 12 * 72, dtype=dtype)
    results = []
    for function, kind in ((gated, dtype), (gated_plainly, dtype), (gated_plainly, torch.float64)):
        inputs = [tensor.detach().to(kind).requires_grad_() for tensor in (heads, gate)]
        y = function(*inputs)
        results.append((y.detach(), *torch.autograd.grad(y, inputs, gradient.to(kind))))
    for one, separate, wanted in zip(*results, strict=True):
        assert difference(one, wanted) <= max(2 * difference(separate, wanted), 1e-6)
    compiled = torch.compile(gated, fullgraph=True)
    assert torch.equal(compiled(heads, gate), gated(heads, gate))


@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16])
def test_adamw_in_one_launch(weights):
    from forge.optimizer.masters import over_masters
    from forge.optimizer.one_launch import OneLaunchAdamW

    master = None if weights is torch.float32 else "float32"
    ours = [draw(*shape, dtype=weights) for shape in ((300, 65), (17,), (5000,))]
    theirs = [weight.clone() for weight in ours]

    def groups(of):
        return [{"params": of[:1], "weight_decay": 0.1}, {"params": of[1:], "weight_decay": 0.0}]

    how = {"lr": 1e-2, "betas": (0.9, 0.999), "eps": 1e-8}
    one = OneLaunchAdamW(groups(ours), master=master, **how)
    twin = over_masters(master, groups(theirs), lambda made: torch.optim.AdamW(made, fused=True, **how))
    for skipped in (0.0, 0.0, 1.0, 0.0):
        for weight, other in zip(ours, theirs, strict=True):
            weight.grad = torch.randn_like(weight)
            other.grad = weight.grad.clone()
        for optimizer in (one, twin):
            optimizer.grad_scale = torch.tensor(3.0, device="cuda")
            optimizer.found_inf = torch.tensor(skipped, device="cuda")
            optimizer.step()
    for weight, other in zip(ours, theirs, strict=True):
        for name in ("exp_avg", "exp_avg_sq", *(["master"] if master else [])):
            assert difference(one.state[weight][name], twin.state[other][name]) < 1e-6
        assert one.state[weight]["step"] == 3
        assert difference(weight, other) < (1e-6 if master is None else ROUNDING / 4)


@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_a_recorded_pass_computes_the_same_bits(micro_batches, dropout):
    from forge.comm.sync import Alone
    from forge.passes.recorded import Recorded
    from forge.passes.turns import Turns
    from forge.precision.bf16 import BF16

    precision, device = BF16("model", True, "float32", None, "float32"), torch.device("cuda")
    model = precision.convert(tiny_model(dropout=dropout).cuda())
    turns = Turns(Alone(model), precision, device, lambda phase: None)
    recorded = Recorded(turns, 1, lambda phase: None)
    for update in range(3):         # the first in turn, the second recorded, the third replayed
        batches = [tiny_batch(seed=10 * update + micro).to(device) for micro in range(micro_batches)]
        scale = torch.tensor(0.01 * (update + 1), device=device)
        results = []
        for passes in (turns, recorded):
            model.zero_grad(set_to_none=True)
            terms = passes(iter(batches), scale)
            results.append([terms["loss_sum"].clone(), *(weight.grad.clone() for weight in model.parameters())])
        assert all(map(torch.equal, *results)), update
