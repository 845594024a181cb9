"""loss=plain: all logits at once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from forge.loss.limits import positive

if TYPE_CHECKING:
    from torch import Tensor

    from forge.config import Config


@dataclass(frozen=True)
class Plain:
    """Keeps N x vocabulary logits, in the compute dtype and in float32.

    pad_to: on a GPU, rows of the head are padded to a multiple of this, and masked; 1: they are as the model has them.
    """

    pad_to: int
    head_products: ClassVar[int] = 3    # logits, and the gradients of hidden and of head_weight

    def __call__(self, hidden: Tensor, head_weight: Tensor, targets: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        from forge.loss.cross_entropy import cross_entropy_sum

        total = cross_entropy_sum(hidden, head_weight, targets, self.pad_to)
        return total * scale, total.detach()

    def problems(self, config: Config) -> Iterator[str]:
        yield from positive("pad_to", self.pad_to)
