"""Products in bfloat16, weights and their updates in float32: the range of float32 with 7 bits of mantissa."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

if TYPE_CHECKING:
    import torch
    from torch import nn

    from forge.config import Config


@dataclass(frozen=True)
class BF16:
    """scope: what autocast surrounds; with blocks, embedding, last norm, head and loss stay in float32.

    cache_enabled: a weight is cast once a forward pass, and the cast one kept until its end.
    reduce: dtype in which gradients are summed over ranks. residual: of the hidden stream; null: the embedding's.
    float32_products: of what autocast leaves in float32, such as a router's gate.
    """

    scope: Literal["model", "blocks"]
    cache_enabled: bool
    reduce: Literal["float32", "bfloat16"]
    residual: Literal["float32", "bfloat16"] | None
    float32_products: Literal["float32", "tf32"]
    compute: ClassVar[str] = "bfloat16"
    parameter: ClassVar[str] = "float32"
    master: ClassVar[None] = None
    loss_scale: ClassVar[None] = None

    def problems(self, config: Config) -> Iterator[str]:
        if self.scope == "blocks" and self.residual == "bfloat16":
            yield ("precision.residual=bfloat16 does not fit precision.scope=blocks, whose head computes in float32: "
                   "set precision.scope=model or precision.residual=null.")

    def convert(self, model: nn.Module) -> nn.Module:
        from forge.precision.cost import say_cost
        from forge.precision.formats import allow_tf32, autocast_blocks, hold

        say_cost("bf16", self.compute, model)
        allow_tf32(self.float32_products == "tf32")
        if self.scope == "blocks":
            autocast_blocks(model, self.compute, self.cache_enabled)
        return hold(model, self.parameter, self.residual)

    def autocast(self, device: torch.device) -> AbstractContextManager[None]:
        if self.scope == "blocks":
            return nullcontext()
        from forge.precision.formats import autocast

        return autocast(device.type, self.compute, self.cache_enabled)
