"""One micro-batch after the other: its forward, then its backward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from forge.comm import Sync
    from forge.passes.turns import Turns
    from forge.precision import Precision


@dataclass(frozen=True)
class InTurn:
    def build(self, sync: Sync, precision: Precision, device: torch.device, mark: Callable[[str], None]) -> Turns:
        from forge.passes.turns import Turns

        return Turns(sync, precision, device, mark)
