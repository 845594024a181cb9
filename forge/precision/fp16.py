"""Products in float16, weights and their updates in float32, the loss scaled so that small gradients do not vanish
(Micikevicius et al. 2018). For GPUs older than bfloat16."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from forge.precision import LossScale

if TYPE_CHECKING:
    import torch
    from torch import nn

    from forge.config import Config


@dataclass(frozen=True)
class FP16:
    """cache_enabled: a weight is cast once a forward pass, and the cast one kept until its end.

    reduce: dtype in which gradients are summed over ranks; they are scaled then. residual: of the hidden stream; null:
    the embedding's. float32_products: of what autocast leaves in float32, such as a router's gate.
    """

    cache_enabled: bool
    reduce: Literal["float32", "bfloat16", "float16"]
    residual: Literal["float32", "float16"] | None
    float32_products: Literal["float32", "tf32"]
    loss_scale: LossScale
    compute: ClassVar[str] = "float16"
    parameter: ClassVar[str] = "float32"
    master: ClassVar[None] = None

    def problems(self, config: Config) -> Iterator[str]:
        scale = self.loss_scale
        name = "precision.loss_scale"
        if scale.init_scale <= 0:
            yield f"{name}.init_scale={scale.init_scale}: a positive number is wanted."
        if scale.growth_factor < 1:
            yield f"{name}.growth_factor={scale.growth_factor}: at least 1 is wanted, which keeps the scale."
        if not 0 < scale.backoff_factor < 1:
            yield (f"{name}.backoff_factor={scale.backoff_factor}: a number between 0 and 1 is wanted, or the scale "
                   f"never falls and every update is skipped.")
        if scale.growth_interval < 1:
            yield f"{name}.growth_interval={scale.growth_interval}: at least 1 update is wanted."

    def convert(self, model: nn.Module) -> nn.Module:
        from forge.precision.cost import say_cost
        from forge.precision.formats import allow_tf32, hold

        say_cost("fp16", self.compute, model)
        allow_tf32(self.float32_products == "tf32")
        return hold(model, self.parameter, self.residual)

    def autocast(self, device: torch.device) -> AbstractContextManager[None]:
        from forge.precision.formats import autocast

        return autocast(device.type, self.compute, self.cache_enabled)
