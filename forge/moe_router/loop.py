"""moe_router=loop."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from forge.moe_router import Routing

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class Loop:
    """Expert by expert: slow on a GPU, and the plain twin of the other routers."""

    def build(self, width: int, hidden: int, routing: Routing) -> nn.Module:
        from forge.moe_router.mixture import Mixture, mix_by_loop

        return Mixture(width, hidden, routing, mix_by_loop)
