"""moe_router=loop."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from forge.moe_router import Routing

if TYPE_CHECKING:
    from torch import nn

    from forge.config import Config


@dataclass(frozen=True)
class Loop:
    """Expert by expert: slow on a GPU, and the plain twin of the other routers."""

    pads_experts: ClassVar[bool] = False    # each expert computes its own tokens and no row more

    def build(self, width: int, hidden: int, routing: Routing) -> nn.Module:
        from forge.moe_router.experts import loop
        from forge.moe_router.mixture import Mixture

        return Mixture(width, hidden, routing, loop)

    def problems(self, config: Config) -> Iterator[str]:
        routed = getattr(config.model, "routing", None) is not None
        if routed and getattr(config.compile, "fullgraph", False):
            yield ("moe_router=loop asks how many tokens each expert got, which no single graph can hold: set "
                   "compile.fullgraph=false, or moe_router=sorted.")
