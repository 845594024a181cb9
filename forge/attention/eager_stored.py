"""attention=eager with a mask that is made once and kept, as the first GPT tutorials do it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from forge.attention import Executes
from forge.attention.eager import Eager

if TYPE_CHECKING:
    from torch import Tensor

    from forge.attention import Layout


@dataclass(frozen=True)
class EagerStored:
    """Keeps the causal mask of the longest row so far, T x T bytes, and cuts each batch's out of it. Same bits as
    eager, which makes the mask anew for each batch and keeps none."""

    executes: ClassVar[Executes] = Eager.executes
    narrow_values: ClassVar[bool] = True

    def plan(self, layout: Layout) -> Tensor | None:
        from forge.attention.mask import stored_mask

        return stored_mask(layout)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, plan: Tensor | None, dropout: float) -> Tensor:
        return Eager()(q, k, v, plan, dropout)
