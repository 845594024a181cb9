"""The mixture of experts that every router of this group builds."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from forge.moe_router import Routing
from forge.moe_router.gate import Choice, Gate, Past, choose

Execute = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]        # see forge.moe_router.experts
Start = Callable[[Execute, Tensor, Tensor, Tensor, Tensor, Tensor], Callable[[], Tensor]]


class SharedExpert(nn.Module):
    """SwiGLU of all tokens: [..., width] -> [..., width]. up.weight holds the gate's rows first."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)         # type: ignore[no-any-return]


class Mixture(nn.Module):
    """SwiGLU experts: see forge.moe_router.MoERouter.build. `execute` decides how they are computed.

    start(execute, tokens, experts, weights, gate_up, down): begins what `execute` computes of these, and returns what
    ends it. Between the two is time for what needs no routed expert. Replaced where the experts are on other ranks.
    """

    start: Start
    bias: Tensor
    average: Tensor
    updates: Tensor
    seen: Tensor

    def __init__(self, width: int, hidden: int, routing: Routing, execute: Execute) -> None:
        super().__init__()
        self.gate = Gate(width, routing.num_experts, routing.jitter)
        self.gate_up = nn.Parameter(torch.empty(routing.num_experts, 2 * hidden, width))
        self.down = nn.Parameter(torch.empty(routing.num_experts, width, hidden))
        self.shared = SharedExpert(width, routing.shared_hidden) if routing.shared_hidden else None
        self.routing, self.execute, self.start = routing, execute, partial      # which does all of it at the end
        for weight in (self.gate_up, self.down):
            nn.init.normal_(weight, std=weight.shape[-1] ** -0.5)   # until the model draws its own
        for name in Past._fields:
            value = torch.zeros((), dtype=torch.float32) if name == "updates" else torch.zeros(
                routing.num_experts, dtype=torch.float32)
            self.register_buffer(name, value, persistent=name != "seen")    # which is empty between two updates

    def forward(self, x: Tensor, valid: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        choice = self.choose(x, valid)
        dtype = self.compute_dtype(x)
        tokens = x.flatten(0, 1).to(dtype)
        finish = self.start(self.execute_for(choice), tokens, choice.experts, choice.weights, self.gate_up.to(dtype),
                            self.down.to(dtype))
        shared = None if self.shared is None else self.shared(x)
        y = finish().view_as(x)
        return y if shared is None else y + shared, choice.aux, choice.load

    def choose(self, x: Tensor, valid: Tensor | None) -> Choice:
        return choose(self.gate(x), valid, self.routing, self.past(), self.training)

    def execute_for(self, choice: Choice) -> Execute:
        return self.execute

    def compute_dtype(self, x: Tensor) -> torch.dtype:
        """What autocast would choose for a matrix product; it does not know the grouped one."""
        if torch.is_autocast_enabled(x.device.type):
            return torch.get_autocast_dtype(x.device.type)
        return self.gate_up.dtype

    def past(self) -> Past:
        return Past(*(getattr(self, name) for name in Past._fields))

    @torch.no_grad()
    def remember(self, load: Tensor) -> None:
        """After a forward pass: its load [num_experts], over all ranks, for those that follow in the same update."""
        self.seen += load

    @torch.no_grad()
    def after_update(self, load: Tensor, passes: Tensor, applied: Tensor) -> None:
        """Once an update. load: [num_experts], as the tokens chose, over all its `passes`, on all ranks. applied:
        scalar bool; where it is False, only what was seen of the update is forgotten. In place, as a CUDA graph reads
        the same memory."""
        routing = self.routing
        self.seen.zero_()
        if routing.balance == "bias":
            moved = self.bias + routing.bias_rate * (load.mean() - load).sign()
            self.bias.copy_(torch.where(applied, moved, self.bias))
        elif routing.balance == "overflow":
            load = load / passes
            smooth = routing.load_decay * self.average + (1 - routing.load_decay) * load
            smooth = torch.where(self.average.any(), smooth, load)
            self.average.copy_(torch.where(applied, smooth, self.average))
            self.updates += applied

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Mixture:
        """Moves and casts, but for what is remembered: it is moved only. In bfloat16 a bias of 0.5 would not change by
        0.001, and a count not by one above 256."""
        kept = {name: getattr(self, name) for name in Past._fields}
        super()._apply(fn, recurse)         # type: ignore[no-untyped-call]
        for name, value in kept.items():
            setattr(self, name, value.to(getattr(self, name).device))
        return self

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        """A snapshot from before the mixture remembered anything leaves it as it is."""
        for name in Past._fields[:3]:
            state_dict.setdefault(prefix + name, getattr(self, name).clone())
        super()._load_from_state_dict(state_dict, prefix, *rest)
