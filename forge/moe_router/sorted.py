"""moe_router=sorted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from forge.moe_router import Routing

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class Sorted:
    """Tokens sorted by expert, then one grouped matrix product for all experts: no host waits, no atomic adds."""

    pads_experts: ClassVar[bool] = False    # each expert computes its own tokens and no row more

    def build(self, width: int, hidden: int, routing: Routing) -> nn.Module:
        from forge.moe_router.experts import by_sorting
        from forge.moe_router.mixture import Mixture

        return Mixture(width, hidden, routing, by_sorting)
