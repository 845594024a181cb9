"""Float64 everywhere: what the errors of all other number formats are measured against."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn

from forge.precision.formats import allow_tf32, hold


@dataclass(frozen=True)
class Float64:
    """See forge.precision.Precision. No option of conf/precision: a model that trains in it gains nothing.

    The frequencies of a rotary embedding, which are part of the formula, stay the float32 numbers they are.
    """

    compute: ClassVar[str] = "float64"
    parameter: ClassVar[str] = "float64"
    master: ClassVar[None] = None
    reduce: ClassVar[str] = "float64"
    residual: ClassVar[None] = None
    loss_scale: ClassVar[None] = None

    def convert(self, model: nn.Module) -> nn.Module:
        allow_tf32(False)
        return hold(model, self.parameter, self.residual)

    def autocast(self, device: torch.device) -> AbstractContextManager[None]:
        return nullcontext()
