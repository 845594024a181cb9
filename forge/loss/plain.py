"""loss=plain: all logits at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Plain:
    """Fastest for small vocabularies. Keeps N x vocabulary logits, in the compute dtype and in float32."""

    head_products: ClassVar[int] = 3    # logits, and the gradients of hidden and of head_weight

    def __call__(self, hidden: Tensor, head_weight: Tensor, targets: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        from forge.loss.cross_entropy import cross_entropy_sum

        total = cross_entropy_sum(hidden, head_weight, targets)
        return total * scale, total.detach()
