"""PyTorch's scaled_dot_product_attention, which chooses the kernel by what the device and the arguments allow."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from forge.attention import Executes

if TYPE_CHECKING:
    from torch import Tensor

    from forge.attention import Layout
    from forge.attention.fused import Choice


@dataclass(frozen=True)
class SDPA:
    """No mask in memory for causal attention; one of B x T x T bytes for documents and windows."""

    executes: ClassVar[Executes] = Executes(scores_again=True, skips="causal")

    def plan(self, layout: Layout) -> Choice:
        from forge.attention.fused import choose

        return choose(layout, None)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, plan: Choice, dropout: float) -> Tensor:
        from forge.attention.fused import attend

        return attend(q, k, v, plan, dropout)
