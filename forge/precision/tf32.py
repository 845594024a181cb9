"""float32 everywhere, but products round their factors to 10 bits of mantissa: fast on NVIDIA GPUs since Ampere."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    import torch
    from torch import nn


@dataclass(frozen=True)
class TF32:
    compute: ClassVar[str] = "tf32"
    parameter: ClassVar[str] = "float32"
    master: ClassVar[None] = None
    reduce: ClassVar[str] = "float32"
    residual: ClassVar[None] = None
    loss_scale: ClassVar[None] = None

    def convert(self, model: nn.Module) -> nn.Module:
        from forge.precision.cost import say_cost
        from forge.precision.formats import allow_tf32, hold

        say_cost("tf32", self.compute, model)
        allow_tf32(True)
        return hold(model, self.parameter, self.residual)

    def autocast(self, device: torch.device) -> AbstractContextManager[None]:
        return nullcontext()
