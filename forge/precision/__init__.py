"""precision: in which number formats weights are held and forward and backward are computed."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    import torch
    from torch import nn


@dataclass(frozen=True)
class LossScale:
    """Dynamic loss scaling (Micikevicius et al. 2018): doubled after growth_interval good steps, halved at a bad one.

    growth_interval: in updates.
    """

    init_scale: float
    growth_factor: float
    backoff_factor: float
    growth_interval: int


@runtime_checkable
class Precision(Protocol):
    compute: str                    # dtype of matrix products: float32, tf32, bfloat16, float16
    parameter: str                  # dtype the weights are held in
    master: str | None              # dtype of the optimizer's copies of them and of its state; None: it has no copies
    reduce: str                     # dtype in which gradients are summed over ranks
    residual: str | None            # dtype of the hidden stream; None: what the embedding gives
    loss_scale: LossScale | None    # None: gradients are not scaled

    def convert(self, model: nn.Module) -> nn.Module:
        """Once, before anything wraps the model: the weights' dtype, the residual stream's, process-wide modes."""
        ...

    def autocast(self, device: torch.device) -> AbstractContextManager[None]:
        """Entered around the forward pass of each micro-batch."""
        ...
