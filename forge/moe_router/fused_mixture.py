"""The mixture that moe_router=fused builds: forge's kernels, where there are some for this device and dtype."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from forge.kernels import runs_on
from forge.moe_router import Routing
from forge.moe_router.by_kernels import by_kernels, choose_and_place, placed_rows, through_experts
from forge.moe_router.experts import by_sorting
from forge.moe_router.gate import Choice, counts_of, imbalance, logits_of, may_move_choices, with_update
from forge.moe_router.memory import Memory
from forge.moe_router.mixture import Execute, Mixture


class FusedMixture(Mixture):
    """Choices that no group limits, and that nothing moves afterwards, are made, counted and placed by one kernel."""

    def choose(self, x: Tensor, valid: Tensor | None) -> Choice:
        routing = self.routing
        moved = self.training and may_move_choices(routing)
        if routing.num_groups > 1 or moved or not _has_kernels(x.device, x.dtype):
            return super().choose(x, valid)
        valid = torch.ones_like(x[..., 0], dtype=torch.bool) if valid is None else valid
        logits = logits_of(x, self.gate.weight, routing.jitter if self.training else 0.0)
        memory = self.memory()
        experts, weights, load, placement = choose_and_place(
            logits.flatten(0, 1), memory.bias, valid.flatten(), routing,
            placed_rows(x.device, self.compute_dtype(x)))
        aux, so_far = logits.new_zeros(()), None
        if routing.aux_loss > 0 or routing.z_loss > 0:
            aux, so_far = _imbalance(logits)(logits, experts, valid, routing, memory, self.training)
        return Choice(experts, weights, aux, with_update(load, so_far), placement)

    def execute_for(self, choice: Choice) -> Execute:
        def execute(tokens: Tensor, experts: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
            if not _has_kernels(tokens.device, tokens.dtype):
                return by_sorting(tokens, experts, weights, gate_up, down)
            if choice.placement is None or experts is not choice.experts:       # they came from other ranks
                return by_kernels(tokens, experts, weights, gate_up, down)
            return through_experts(tokens, weights, gate_up, down, choice.placement)

        return execute


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _has_kernels(device: torch.device, dtype: torch.dtype) -> bool:
    # float64 is what others are measured against, and wants no word.
    return dtype.itemsize <= 4 and runs_on(device, "moe_router=fused", "moe_router=sorted, which computes the same")


def _imbalance(logits: Tensor) -> Any:
    """In few kernels on a GPU, where no graph around it does so already."""
    return _compiled() if logits.is_cuda and not torch.compiler.is_compiling() else _counted_imbalance


def _counted_imbalance(logits: Tensor, experts: Tensor, valid: Tensor, routing: Routing, memory: Memory,
                       training: bool) -> tuple[Tensor, Tensor | None]:
    """With the counting inside, so that no compiled kernel has to read counts of [N, num_experts]."""
    return imbalance(logits, counts_of(experts, valid, logits), valid, routing, memory, training)


@cache
def _compiled() -> Any:
    return torch.compile(_counted_imbalance)
