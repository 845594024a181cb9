"""loss=inplace: the gradient of the logits takes their place."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Inplace:
    """All logits at once, once: no float32 copy, no second tensor of their size. Fastest where they fit."""

    def __call__(self, hidden: Tensor, head_weight: Tensor, targets: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        from forge.loss.overwriting import overwriting_cross_entropy_sum

        return overwriting_cross_entropy_sum(hidden, head_weight, targets, scale)
