"""loss=inplace: the gradient of the logits takes their place."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from forge.loss.limits import positive

if TYPE_CHECKING:
    from torch import Tensor

    from forge.config import Config


@dataclass(frozen=True)
class Inplace:
    """All logits at once, once: no float32 copy, no second tensor of their size. Fastest where they fit.

    pad_to: as in plain.
    """

    pad_to: int
    head_products: ClassVar[int] = 3    # logits, and the gradients of hidden and of head_weight

    def __call__(self, hidden: Tensor, head_weight: Tensor, targets: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        from forge.loss.overwriting import overwriting_cross_entropy_sum

        return overwriting_cross_entropy_sum(hidden, head_weight, targets, scale, self.pad_to)

    def problems(self, config: Config) -> Iterator[str]:
        yield from positive("pad_to", self.pad_to)
