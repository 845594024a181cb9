"""moe_router=sonic."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, ClassVar

from forge.moe_router import Routing

if TYPE_CHECKING:
    from torch import nn

    from forge.config import Config

PACKAGE, INSTALL = "sonicmoe", "docs/options/moe_router.md says how"
MISSING = (f"moe_router=sonic needs the package sonic-moe, which is not installed: {INSTALL}. Without it, take "
           f"moe_router=fused.")


@dataclass(frozen=True)
class Sonic:
    """The experts by the package sonic-moe, behind forge's own gate. Hopper GPUs and later, in 16 bits."""

    pads_experts: ClassVar[bool] = False    # each expert computes its own tokens and no row more

    def build(self, width: int, hidden: int, routing: Routing) -> nn.Module:
        from forge.moe_router.by_sonic import by_sonic
        from forge.moe_router.mixture import Mixture

        return Mixture(width, hidden, routing, by_sonic)

    def problems(self, config: Config) -> Iterator[str]:
        routing = getattr(config.model, "routing", None)
        if routing is None:
            return
        if find_spec(PACKAGE) is None:
            yield MISSING
        if getattr(config.compile, "fullgraph", False):
            yield ("moe_router=sonic runs a package that torch.compile cannot look into: set compile.fullgraph=false, "
                   "or moe_router=fused.")
        for name in ("width", "hidden"):
            if getattr(config.model, name, 0) % 8:
                yield (f"model.{name}={getattr(config.model, name)}: moe_router=sonic reads rows of 16 bytes: make it "
                       f"a multiple of 8, or take moe_router=sorted.")
