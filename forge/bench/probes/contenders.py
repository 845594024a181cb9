"""Layers of mixed experts, as forge's routers and others compute them, and what they are held against.

Each is given the same weights, tokens and routing. The others are written anew and short, from what their projects
say of themselves: torchtitan (three products, weights multiplied in float32, a deterministic scatter-add) and
transformers' grouped_mm (two products, weights in the experts' format, an inverse gather and a sum).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from forge.bench.probes.products import kernel_products, plain_products, torch_products
from forge.moe_router.exact import plain_product, split_product
from forge.moe_router.grouped import grouped_product

if TYPE_CHECKING:
    from forge.moe_router import MoERouter, Routing

LEANING = 6.0       # logits are drawn with deviation 1: so much more or less decides for any token
METADATA = 16       # bytes a choice that a backward pass cannot do without: its weight, expert, row and token


@dataclass(frozen=True)
class Layer:
    """x, gradient: [tokens, width]. gate: [num_experts, width], rows of length 1. gate_up, down: as in MoERouter."""

    x: Tensor
    gradient: Tensor
    gate: Tensor
    gate_up: Tensor
    down: Tensor
    routing: Routing

    @classmethod
    def drawn(cls, shape: dict[str, int], routing: Routing, device: torch.device, dtype: torch.dtype,
              gate: torch.dtype) -> Layer:
        """routing: whose scores and weights are taken; what costs, or moves tokens, beside them is left out, since
        the others have none of it. dtype: of all but the gate's weights."""
        drawn = torch.Generator(device).manual_seed(0)
        tokens, width, hidden, experts = (shape[name] for name in ("tokens", "width", "hidden", "experts"))

        def normal(*sizes: int, deviation: float = 1.0, dtype: torch.dtype = dtype) -> Tensor:
            return torch.empty(sizes, device=device, dtype=dtype).normal_(0, deviation, generator=drawn)

        plain = replace(routing, num_experts=experts, top_k=shape["top_k"], num_groups=1, top_groups=1, shared_hidden=0,
                        jitter=0.0, aux_loss=0.0, z_loss=0.0, balance="none", capacity_factor=None)
        return cls(normal(tokens, width), normal(tokens, width),
                   F.normalize(normal(experts, width, dtype=torch.float32), dim=-1).to(gate),
                   normal(experts, 2 * hidden, width, deviation=width ** -0.5),
                   normal(experts, width, hidden, deviation=hidden ** -0.5), plain)

    @property
    def flops(self) -> float:
        """Of forward and backward, without the gate's: six products of each row with `width * hidden` numbers, and
        twice as many back."""
        return 18.0 * self.rows * self.down[0].numel()

    @property
    def coarsest(self) -> torch.dtype:
        """The number format that rounds most."""
        return max((self.x.dtype, self.gate.dtype), key=lambda dtype: torch.finfo(dtype).eps)

    @property
    def rows(self) -> int:
        return len(self.x) * self.routing.top_k

    @property
    def least_saved(self) -> int:
        """Bytes that forward must keep: what it is given, what enters the activation, and METADATA."""
        return (self.x.numel() + self.rows * self.gate_up.shape[1]) * self.x.element_size() + METADATA * self.rows

    def skewed(self, load: float) -> Tensor:
        """x, so that the first expert is chosen by `load` times the mean of all, or by every token."""
        toward = torch.linalg.pinv(self.gate.double().cpu())[:, 0].to(self.x)       # adds to its logit alone
        share = min(1.0, load * self.routing.top_k / self.routing.num_experts)
        chosen = torch.arange(len(self.x), device=self.x.device) < round(share * len(self.x))
        leaning = torch.where(chosen, LEANING, -LEANING).to(self.x)
        return torch.addcmul(self.x, leaning.unsqueeze(-1), toward)


@dataclass(frozen=True)
class Contender:
    """forward: of x, a clone of `x`. weights: whose gradients it makes; those of gate_up.0 and gate_up.1 are halves.

    kind: what it computes: experts; dense, a feed-forward layer of as many operations; or products, of tokens that are
    sorted already. routed: it executes model.routing as it stands, auxiliary losses too.
    """

    name: str
    kind: str
    forward: Callable[[Tensor], Tensor]
    x: Tensor
    gradient: Tensor
    weights: dict[str, Tensor]
    routed: bool = False


def contender(name: str, layer: Layer, option: MoERouter | None) -> Contender:
    """option: of moe_router, where the name is one's. Raises ForgeError where it cannot run here."""
    if option is not None:
        return _mixture(name, _built(option, layer), layer)
    return MADE[name](name, layer)


def _mixture(name: str, mixture: nn.Module, layer: Layer) -> Contender:
    losses = layer.routing.aux_loss > 0 or layer.routing.z_loss > 0

    def forward(x: Tensor) -> Tensor:
        y, aux, _ = mixture(x.unsqueeze(0), None)
        found: Tensor = _WithLosses.apply(y, aux) if losses else y      # type: ignore[no-untyped-call]
        return found.squeeze(0)

    return Contender(name, "experts", forward, layer.x, layer.gradient, dict(mixture.named_parameters()), routed=True)


class _WithLosses(torch.autograd.Function):
    """y, with which the gradient of the losses comes along."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, aux: Tensor) -> Tensor:
        ctx.save_for_backward(aux)
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        return grads[0], torch.ones_like(ctx.saved_tensors[0])


def _built(option: MoERouter, layer: Layer) -> nn.Module:
    """With the layer's weights, which no contender changes."""
    with torch.device(layer.x.device):
        mixture: Any = option.build(layer.x.shape[1], layer.down.shape[2], layer.routing).to(layer.x.dtype)
    mixture.gate.weight, mixture.gate_up, mixture.down = (
        nn.Parameter(weight) for weight in (layer.gate, layer.gate_up, layer.down))
    return mixture      # type: ignore[no-any-return]


def _sorted_compiled(name: str, layer: Layer) -> Contender:
    from forge.moe_router.sorted import Sorted

    mixture = _built(Sorted(), layer)
    mixture.compile(dynamic=False)
    return _mixture(name, mixture, layer)


def _dense(name: str, layer: Layer) -> Contender:
    """The weights of as many experts as a token chooses, in one."""
    chosen = layer.routing.top_k
    up = layer.gate_up[:chosen].reshape(-1, layer.x.shape[1]).clone().requires_grad_()
    down = layer.down[:chosen].permute(1, 0, 2).reshape(layer.x.shape[1], -1).clone().requires_grad_()
    return Contender(name, "dense", lambda x: F.linear(_swiglu(F.linear(x, up)), down), layer.x, layer.gradient,
                     {"up": up, "down": down})


def _products(make: Callable[[Tensor, Layer], Callable[..., Tensor]],
              chosen_by: Layer | None = None) -> Callable[[str, Layer], Contender]:
    """chosen_by: the layer whose gate chooses. In another number format a close choice falls the other way, and all
    rows between its two experts stand elsewhere."""
    def made(name: str, layer: Layer) -> Contender:
        chooser = chosen_by or layer
        experts = _plain_gate(chooser.x, chooser.gate, chooser.routing)[1].flatten()
        order = experts.argsort(stable=True)
        tokens = order // layer.routing.top_k
        weights = {"gate_up": layer.gate_up.detach().requires_grad_(), "down": layer.down.detach().requires_grad_()}
        multiply = make(experts[order], layer)
        return Contender(name, "products", lambda x: multiply(x, *weights.values()), layer.x[tokens],
                         layer.gradient[tokens], weights)
    return made


def _behind_a_plain_gate(execute: Callable[..., Tensor], halved: bool = False) -> Callable[[str, Layer], Contender]:
    """execute: see forge.moe_router.experts; halved: it takes the halves of gate_up, which are parameters there."""
    def made(name: str, layer: Layer) -> Contender:
        halves = [half.contiguous().requires_grad_() for half in layer.gate_up.chunk(2, dim=1)] if halved else \
            [layer.gate_up.detach().requires_grad_()]
        gate, down = (weight.detach().requires_grad_() for weight in (layer.gate, layer.down))

        def forward(x: Tensor) -> Tensor:
            weights, experts = _plain_gate(x, gate, layer.routing)
            return execute(x, experts, weights, *halves, down)

        names = ["gate_up.0", "gate_up.1"] if halved else ["gate_up"]
        return Contender(name, "experts", forward, layer.x, layer.gradient,
                         {"gate.weight": gate, **dict(zip(names, halves, strict=True)), "down": down})
    return made


def _plain_gate(x: Tensor, gate: Tensor, routing: Routing) -> tuple[Tensor, Tensor]:
    """(weights, experts) [tokens, top_k] by torch.topk, whose ties go anywhere: random logits have none."""
    # The same product as forge's own gate: what is compared is the rest.
    logits = (split_product if x.is_cuda and x.dtype == torch.bfloat16 else plain_product)(x, gate)
    if routing.score == "softmax_of_chosen":
        chosen, experts = logits.topk(routing.top_k, dim=-1)
        return chosen.softmax(dim=-1) * routing.scale, experts
    scores = logits.sigmoid() if routing.score == "sigmoid" else logits.softmax(dim=-1)
    weights, experts = scores.topk(routing.top_k, dim=-1)
    if routing.normalize:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return weights * routing.scale, experts


def _as_torchtitan(tokens: Tensor, experts: Tensor, weights: Tensor, gate_weight: Tensor, up_weight: Tensor,
                   down: Tensor) -> Tensor:
    order = experts.flatten().argsort(stable=True)
    ends = _ends(experts, len(down))
    source = order // experts.shape[1]
    rows = tokens[source]
    hidden = F.silu(grouped_product(rows, gate_weight, ends)) * grouped_product(rows, up_weight, ends)
    out = grouped_product(hidden, down, ends)
    out = (out.float() * weights.flatten()[order].unsqueeze(-1)).to(out.dtype)
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        return torch.zeros_like(tokens).scatter_add(0, source.unsqueeze(-1).expand_as(out), out)
    finally:
        torch.use_deterministic_algorithms(before)


def _as_transformers(tokens: Tensor, experts: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    order = experts.flatten().argsort()
    place = order.argsort()
    ends = _ends(experts, len(down))
    hidden = _swiglu(grouped_product(tokens[order // experts.shape[1]], gate_up, ends))
    out = grouped_product(hidden, down, ends) * weights.to(tokens.dtype).flatten()[order].unsqueeze(-1)
    summed: Tensor = out[place].view(*experts.shape, tokens.shape[1]).sum(dim=1)
    return summed


def _by_sonic(tokens: Tensor, experts: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """SonicMoE's experts behind the cheapest gate: what moe_router=sonic would cost if its gate cost no more."""
    from forge.moe_router.by_sonic import by_sonic

    y: Tensor = by_sonic(tokens, experts, weights, gate_up, down)
    return y


def _ends(experts: Tensor, num_experts: int) -> Tensor:
    counts = torch.histc(experts.flatten().float(), bins=num_experts, min=0, max=num_experts - 1)
    return counts.cumsum(0).to(torch.int32)


def _swiglu(gate_and_up: Tensor) -> Tensor:
    gate, up = gate_and_up.chunk(2, dim=-1)
    return F.silu(gate) * up


MADE: dict[str, Callable[[str, Layer], Contender]] = {
    "dense": _dense, "sorted_compiled": _sorted_compiled,
    "grouped_only": _products(torch_products), "grouped_kernels": _products(kernel_products),
    "torchtitan_way": _behind_a_plain_gate(_as_torchtitan, halved=True),
    "hf_way": _behind_a_plain_gate(_as_transformers), "sonic_way": _behind_a_plain_gate(_by_sonic)}


def plain(kind: str, layer: Layer) -> Contender:
    """The plain algorithm of a kind, in float32: what contenders are held against."""
    from forge.moe_router.loop import Loop

    wide = replace(layer, x=layer.x.float(), gradient=layer.gradient.float(), gate=layer.gate.float(),
                   gate_up=layer.gate_up.float(), down=layer.down.float())
    if kind == "experts":
        return contender(kind, wide, Loop())
    return (_dense if kind == "dense" else _products(plain_products, layer))(kind, wide)
