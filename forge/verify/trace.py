"""What each module of a model gives, in few numbers: to name the first that gives something else."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

SAMPLES = 2048          # numbers kept of a module's output: enough to see an error, few enough for any model


@dataclass
class Trace:
    """seen: module -> the numbers its first call gave, in the order in which modules finish."""

    seen: dict[str, list[float]] = field(default_factory=dict)

    @classmethod
    @contextmanager
    def of(cls, model: nn.Module, wanted: bool) -> Iterator[Trace]:
        """Records while it is open, if it is wanted."""
        trace = cls()
        hooks = [module.register_forward_hook(trace._noting(name)) for name, module in model.named_modules()
                 if wanted and name]
        try:
            yield trace
        finally:
            for hook in hooks:
                hook.remove()

    def _noting(self, name: str) -> Any:
        def note(module: nn.Module, given: Any, output: Any) -> None:
            if name not in self.seen:       # once: recomputation and later batches come here as well
                tensors = [one for one in (output if isinstance(output, tuple) else (output,))
                           if isinstance(one, Tensor) and one.is_floating_point() and one.numel()]
                self.seen[name] = [number for tensor in tensors for number in _sampled(tensor)]

        return note


def _sampled(tensor: Tensor) -> list[float]:
    flat = tensor.detach().flatten()
    places = torch.linspace(0, flat.numel() - 1, min(SAMPLES, flat.numel()), dtype=torch.float64).long()
    numbers: list[float] = flat[places.to(flat.device)].double().tolist()
    return numbers
