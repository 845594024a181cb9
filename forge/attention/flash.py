"""FlashAttention (Dao 2023), as PyTorch ships it: the scores never reach memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from forge.attention import Executes
from forge.attention.limits import half_precision, head_width

if TYPE_CHECKING:
    from torch import Tensor

    from forge.attention import Layout
    from forge.attention.fused import Choice
    from forge.config import Config


@dataclass(frozen=True)
class Flash:
    """On a GPU in half precision; on a CPU in float32 too, without dropout."""

    executes: ClassVar[Executes] = Executes(scores_again=True, skips="causal")

    def problems(self, config: Config) -> Iterator[str]:
        yield from half_precision("flash", config)
        yield from head_width("flash", config, most=256, multiple=1)    # PyTorch pads to the kernel's multiple of 8

    def plan(self, layout: Layout) -> Choice:
        from forge.attention.fused import choose

        return choose(layout, "flash")

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, plan: Choice, dropout: float) -> Tensor:
        from forge.attention.fused import attend

        return attend(q, k, v, plan, dropout)
