"""Everything in float32, its products too: the twin of all other precisions."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    import torch
    from torch import nn


@dataclass(frozen=True)
class FP32:
    compute: ClassVar[str] = "float32"
    parameter: ClassVar[str] = "float32"
    master: ClassVar[None] = None
    reduce: ClassVar[str] = "float32"
    residual: ClassVar[None] = None
    loss_scale: ClassVar[None] = None

    def convert(self, model: nn.Module) -> nn.Module:
        from forge.precision.formats import allow_tf32, hold

        allow_tf32(False)
        return hold(model, self.parameter, self.residual)

    def autocast(self, device: torch.device) -> AbstractContextManager[None]:
        return nullcontext()
