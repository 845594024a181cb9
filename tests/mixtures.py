"""Mixtures of experts at odd shapes, on any device, each with the loop's results in float32 to compare with.

Tokens and gates are drawn from few small numbers, so that logits are exact whatever order a router sums them in: all
choose the same experts, in ties too, of which there are many.
"""

from pathlib import Path
from typing import NamedTuple

import torch
from routings import routing

from forge.config import conf_dir, option_of
from forge.moe_router import MoERouter
from forge.moe_router.loop import Loop

WARM = 100          # updates

OPTIONS = sorted(path.stem for path in Path(conf_dir(), "moe_router").glob("*.yaml") if path.stem != "loop")


def option(name):
    import yaml

    return option_of("moe_router", MoERouter, yaml.safe_load(Path(conf_dir(), f"moe_router/{name}.yaml").read_text()))


class Case(NamedTuple):
    """aimed: every token chooses the experts with the highest ids. biased: the choice sees biases. wide_gate: in
    bfloat16 too the gate's weights are float32, and need it, as those of a run under autocast. how: settings of
    routing, (name, value) each."""

    tokens: int
    top_k: int
    experts: int
    width: int
    hidden: int
    aimed: bool = False
    biased: bool = False
    wide_gate: bool = False
    how: tuple[tuple[str, object], ...] = ()

    @property
    def routing(self):
        return routing(**{"num_experts": self.experts, "top_k": self.top_k, "normalize": True, "aux_loss": 0.3,
                          "aux_scope": "sequence", "z_loss": 0.1, **dict(self.how)})

    def by(self, **how):
        return self._replace(how=tuple(how.items()))


def mixture(router, case, device, dtype):
    """With the same weights for every router, and for every dtype weights that bfloat16 holds exactly."""
    drawn = torch.Generator().manual_seed(5)
    made = router.build(case.width, case.hidden, case.routing)
    gate = torch.randint(-8, 9, made.gate.weight.shape, generator=drawn) / 32
    # Up to 2**12, by a token's up to 2**3: a float32 holds the sum of 512 such products, whatever the order.
    wide = torch.randint(-4096, 4097, made.gate.weight.shape, generator=drawn) / 2**14
    with torch.no_grad():
        for weight in (made.gate_up, made.down):
            weight.copy_(torch.randn(weight.shape, generator=drawn).bfloat16().float() * weight.shape[-1] ** -0.5)
        made.gate.weight.copy_(torch.arange(case.experts)[:, None] / 32 if case.aimed else gate)
        made.bias.copy_(torch.randint(-16, 17, made.bias.shape, generator=drawn) / 128 * case.biased)
        made.num_updates.fill_(WARM)        # what begins by and by has begun
    made.bfloat16().to(device, dtype)
    if case.wide_gate:
        made.gate.weight = torch.nn.Parameter(wide.to(device))
    return made


def inputs(case, device, dtype):
    """x [1, tokens, width], which of the tokens count, and the gradient of the output."""
    drawn = torch.Generator().manual_seed(7)
    x = torch.randint(-8, 9, (1, case.tokens, case.width), generator=drawn) / 4
    gradient = torch.randn(x.shape, generator=drawn).bfloat16()
    valid = torch.arange(case.tokens)[None] < max(1, case.tokens - 2)
    return (x.abs() if case.aimed else x).to(device, dtype), valid.to(device), gradient.to(device, dtype)


def results(made, x, valid, gradient):
    made.zero_grad()
    x = x.clone().requires_grad_()
    y, aux, load = made(x, valid)
    torch.autograd.backward([y, aux], [gradient.to(y.dtype), None])
    return {"y": y.detach(), "aux": aux.detach(), "load": load, "x": x.grad,
            **{name: parameter.grad for name, parameter in made.named_parameters()}}


def assert_equal_to_the_loop(router, case, device, dtype):
    """bfloat16: what enters a product, and what leaves it, is rounded (half of eps = 2 ** -8 each): forward three times
    (up, activation, down), backward as often again; the errors are independent and add up as a root.

    float32: sums of up to n terms in another order: a random walk of sqrt(n) roundings, u = 2 ** -24, in each of
    those six; n is the rows, or the width of a product.
    """
    terms = max(case.tokens * case.top_k, case.width, 2 * case.hidden)
    bound = 6**0.5 * (2**-8 if dtype == torch.bfloat16 else 4 * terms**0.5 * 2**-24)
    ours = results(mixture(router, case, device, dtype), *inputs(case, device, dtype))
    plain = results(mixture(Loop(), case, device, torch.float32), *inputs(case, device, torch.float32))
    assert torch.equal(ours["load"], plain["load"])
    largest = max(float(wanted.norm()) for wanted in plain.values())
    for name, wanted in plain.items():
        found = ours[name].float()
        assert found.isfinite().all(), name
        assert (found - wanted).norm() <= bound * (float(wanted.norm()) or largest), name
    return plain


def poison(device):
    """What is freed and taken again holds no numbers."""
    if torch.device(device).type == "cuda":
        torch.full((2**28,), float("nan"), device=device)


def assert_no_memory_is_read_before_it_is_written(router, case, device, dtype):
    """torch fills what is new with nan, and with the largest whole number, where it is deterministic."""
    made, told = mixture(router, case, device, dtype), inputs(case, device, dtype)
    plain = results(made, *told)
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        for _ in range(2):
            poison(device)
            again = results(made, *told)
            for name, wanted in plain.items():
                assert again[name].isfinite().all(), name
                assert (again[name].float() - wanted.float()).norm() <= 2**-8 * wanted.float().norm(), name
    finally:
        torch.use_deterministic_algorithms(False)
