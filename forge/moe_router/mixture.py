"""The mixture of experts that every router of this group builds."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial

import torch
from torch import Tensor, nn

from forge.moe_router import Routing
from forge.moe_router.experts import by_sorting, loop
from forge.moe_router.gate import choose
from forge.notes import say

Execute = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]        # see forge.moe_router.experts
Start = Callable[[Execute, Tensor, Tensor, Tensor, Tensor, Tensor], Callable[[], Tensor]]
Mix = Callable[[Tensor, "Tensor | None", Tensor, Tensor, Tensor, Routing, Start], tuple[Tensor, Tensor, Tensor]]


class Mixture(nn.Module):
    """SwiGLU experts: see forge.moe_router.MoERouter.build. `mix` decides how they are computed.

    start(execute, tokens, experts, weights, gate_up, down): begins what `execute` computes of these, and returns what
    ends it. Between the two is time for what needs no routed expert. Replaced where the experts are on other ranks.
    """

    start: Start

    def __init__(self, width: int, hidden: int, routing: Routing, mix: Mix) -> None:
        super().__init__()
        self.gate = nn.Linear(width, routing.num_experts, bias=False)
        self.gate_up = nn.Parameter(torch.empty(routing.num_experts, 2 * hidden, width))
        self.down = nn.Parameter(torch.empty(routing.num_experts, width, hidden))
        self.routing, self.mix, self.start = routing, mix, partial      # all of it at the end
        for weight in (self.gate_up, self.down):
            nn.init.normal_(weight, std=weight.shape[-1] ** -0.5)   # until the model draws its own

    def forward(self, x: Tensor, valid: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        return self.mix(x, valid, self.gate.weight, self.gate_up, self.down, self.routing, self.start)


def mix_by_loop(x: Tensor, valid: Tensor | None, gate: Tensor, gate_up: Tensor, down: Tensor,
                routing: Routing, start: Start) -> tuple[Tensor, Tensor, Tensor]:
    """The plain algorithm, the twin of all others."""
    return _mix(loop, x, valid, gate, gate_up, down, routing, start)


def mix_by_sorting(x: Tensor, valid: Tensor | None, gate: Tensor, gate_up: Tensor, down: Tensor,
                   routing: Routing, start: Start) -> tuple[Tensor, Tensor, Tensor]:
    """One grouped matrix product for all experts."""
    return _mix(by_sorting, x, valid, gate, gate_up, down, routing, start)


def mix_fused(x: Tensor, valid: Tensor | None, gate: Tensor, gate_up: Tensor, down: Tensor,
              routing: Routing, start: Start) -> tuple[Tensor, Tensor, Tensor]:
    """mix_by_sorting, with everything between the matrix products compiled into few kernels on a GPU."""
    if _can_fuse(x.device.type) and not torch.compiler.is_compiling():      # a graph around it fuses it too
        return _compiled()(x, valid, gate, gate_up, down, routing, start)
    return mix_by_sorting(x, valid, gate, gate_up, down, routing, start)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _can_fuse(device_type: str) -> bool:
    if device_type != "cuda":
        say(f"moe_router=fused has kernels for a GPU only: on {device_type} it computes what moe_router=sorted does.")
    return device_type == "cuda"


@cache
def _compiled() -> Mix:
    return torch.compile(mix_by_sorting)


def _mix(execute: Execute, x: Tensor, valid: Tensor | None, gate: Tensor, gate_up: Tensor, down: Tensor,
         routing: Routing, start: Start) -> tuple[Tensor, Tensor, Tensor]:
    experts, weights, aux, load = choose(x, valid, gate, routing)
    dtype = _compute_dtype(x, gate_up)
    finish = start(execute, x.flatten(0, 1).to(dtype), experts, weights, gate_up.to(dtype), down.to(dtype))
    return finish().view_as(x), aux, load.detach()


def _compute_dtype(x: Tensor, weight: Tensor) -> torch.dtype:
    """What autocast would choose for a matrix product; it does not know the grouped one."""
    if torch.is_autocast_enabled(x.device.type):
        return torch.get_autocast_dtype(x.device.type)
    return weight.dtype
