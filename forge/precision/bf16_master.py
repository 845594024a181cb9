"""Weights, gradients and products in bfloat16, updates in float32: the optimizer keeps a float32 master of each weight.

What bf16 casts in every forward pass is here cast once an update, by the optimizer, while it holds the number anyway.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

if TYPE_CHECKING:
    import torch
    from torch import nn


@dataclass(frozen=True)
class BF16Master:
    """reduce: dtype in which gradients are summed over ranks. float32_products: of what the model itself computes in
    float32, such as a router's gate. The hidden stream is in bfloat16, as everything is."""

    reduce: Literal["float32", "bfloat16"]
    float32_products: Literal["float32", "tf32"]
    compute: ClassVar[str] = "bfloat16"
    parameter: ClassVar[str] = "bfloat16"
    master: ClassVar[str] = "float32"
    residual: ClassVar[None] = None
    loss_scale: ClassVar[None] = None

    def convert(self, model: nn.Module) -> nn.Module:
        from forge.precision.cost import say_cost
        from forge.precision.formats import allow_tf32, hold

        say_cost("bf16_master", self.compute, model)
        allow_tf32(self.float32_products == "tf32")
        return hold(model, self.parameter, self.residual)

    def autocast(self, device: torch.device) -> AbstractContextManager[None]:
        return nullcontext()
