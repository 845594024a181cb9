"""moe_router=fused."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from forge.moe_router import Routing

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class Fused:
    """The sorted algorithm, compiled, so that sorting, activation and weighting become few kernels. GPU only."""

    def build(self, width: int, hidden: int, routing: Routing) -> nn.Module:
        from forge.moe_router.mixture import Mixture, mix_fused

        return Mixture(width, hidden, routing, mix_fused)
