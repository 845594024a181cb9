"""Products of the blocks' linear layers in 8 bits (Micikevicius et al. 2022), all else as in bf16: twice the products a
second on GPUs that have units for it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

if TYPE_CHECKING:
    import torch
    from torch import nn

    from forge.config import Config


@dataclass(frozen=True)
class FP8:
    """layers: names of linear layers inside blocks, as patterns of a shell, whose products are computed in 8 bits.

    fast_accumulation: forward products add up in fewer bits, and faster; backward ones never do.
    cache_enabled, reduce, residual, float32_products: of what stays in bfloat16, as in precision=bf16.
    """

    layers: list[str]
    fast_accumulation: bool
    cache_enabled: bool
    reduce: Literal["float32", "bfloat16"]
    residual: Literal["float32", "bfloat16"] | None
    float32_products: Literal["float32", "tf32"]
    compute: ClassVar[str] = "bfloat16"         # of attention, experts and head; see `layers` for the rest
    parameter: ClassVar[str] = "float32"
    master: ClassVar[None] = None
    loss_scale: ClassVar[None] = None
    peak_over_bf16: ClassVar[float] = 2.0       # 8-bit products a second for one in bfloat16, by the datasheets

    def problems(self, config: Config) -> Iterator[str]:
        if not self.layers:
            yield "precision.layers=[] leaves nothing to compute in 8 bits: name some, or set precision=bf16."

    def convert(self, model: nn.Module) -> nn.Module:
        from forge.precision.cost import say_cost
        from forge.precision.formats import allow_tf32, hold
        from forge.precision.scaled import scale_linears

        say_cost("fp8", self.compute, model)
        allow_tf32(self.float32_products == "tf32")
        scale_linears(model, self.layers, self.fast_accumulation)
        return hold(model, self.parameter, self.residual)

    def autocast(self, device: torch.device) -> AbstractContextManager[None]:
        from forge.precision.formats import autocast

        return autocast(device.type, self.compute, self.cache_enabled)
