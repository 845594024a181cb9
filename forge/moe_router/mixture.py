"""The mixture of experts that every router of this group builds."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from forge.moe_router import Routing
from forge.moe_router.gate import Choice, choose
from forge.moe_router.memory import Remembering

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


def all_at_the_end(execute: Execute, tokens: Tensor, experts: Tensor, weights: Tensor, gate_up: Tensor,
                   down: Tensor) -> Callable[[], Tensor]:
    """The `start` of a mixture whose experts are all here: nothing has to be on its way before."""
    return partial(execute, tokens, experts, weights, gate_up, down)


class Mixture(Remembering):
    """SwiGLU experts: see forge.moe_router.MoERouter.build. `execute` decides how they are computed.

    start(execute, tokens, experts, weights, gate_up, down): begins what `execute` computes of these, and returns what
    ends it. Between the two is time for what needs no routed expert. Replaced where the experts are on other ranks.
    """

    start: Start

    def __init__(self, width: int, hidden: int, routing: Routing, execute: Execute) -> None:
        super().__init__(routing)
        self.gate = nn.Linear(width, routing.num_experts, bias=False)
        self.gate_up = nn.Parameter(torch.empty(routing.num_experts, 2 * hidden, width))
        self.down = nn.Parameter(torch.empty(routing.num_experts, width, hidden))
        self.shared = SharedExpert(width, routing.shared_hidden) if routing.shared_hidden else None
        self.execute, self.start = execute, all_at_the_end
        for weight in (self.gate_up, self.down):
            nn.init.normal_(weight, std=weight.shape[-1] ** -0.5)   # until the model draws its own

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
        return choose(x, valid, self.gate.weight, self.routing, self.memory(), self.training)

    def execute_for(self, choice: Choice) -> Execute:
        return self.execute

    def compute_dtype(self, x: Tensor) -> torch.dtype:
        """What autocast would choose for a matrix product; it does not know the grouped one."""
        if torch.is_autocast_enabled(x.device.type):
            return torch.get_autocast_dtype(x.device.type)
        return self.gate_up.dtype
