"""Attention as it is written in textbooks: product, mask, softmax, product. The twin of all other options."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from forge.attention import Executes

if TYPE_CHECKING:
    from torch import Tensor

    from forge.attention import Layout


@dataclass(frozen=True)
class Eager:
    """Holds the scores [B, heads, T, T] in memory. Softmax in at least float32, as Hugging Face has it."""

    executes: ClassVar[Executes] = Executes(scores_again=False, skips="none")
    narrow_values: ClassVar[bool] = True

    def plan(self, layout: Layout) -> Tensor | None:
        from forge.attention.mask import mask

        return mask(layout)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, plan: Tensor | None, dropout: float) -> Tensor:
        import torch.nn.functional as F
        from torch import float32, promote_types

        from forge.attention.heads import repeat

        k, v = repeat(q, k, v)
        scores = (q @ k.transpose(-2, -1)) * q.shape[-1] ** -0.5
        if plan is not None:
            scores = scores.masked_fill(~plan, float("-inf"))
        weights = scores.softmax(-1, dtype=promote_types(scores.dtype, float32)).to(v.dtype)
        return F.dropout(weights, dropout, training=dropout > 0) @ v
