"""moe_router=fused."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from forge.moe_router import Routing

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class Fused:
    """The sorted algorithm, compiled, so that sorting, activation and weighting become few kernels. GPU only."""

    pads_experts: ClassVar[bool] = False    # each expert computes its own tokens and no row more

    def build(self, width: int, hidden: int, routing: Routing) -> nn.Module:
        from forge.moe_router.experts import by_sorting
        from forge.moe_router.mixture import CompiledMixture

        return CompiledMixture(width, hidden, routing, by_sorting)
