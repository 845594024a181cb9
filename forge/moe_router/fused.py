"""moe_router=fused."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from forge.moe_router import Routing

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class Fused:
    """forge's own Triton kernels: tokens are gathered inside the matrix products, and never copied. For GPUs."""

    pads_experts: ClassVar[bool] = False    # each expert computes its own tokens and no row more

    def build(self, width: int, hidden: int, routing: Routing) -> nn.Module:
        from forge.moe_router.experts import by_sorting
        from forge.moe_router.fused_mixture import FusedMixture

        return FusedMixture(width, hidden, routing, by_sorting)
