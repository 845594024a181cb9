"""FlashAttention (Dao 2023), as PyTorch ships it: the scores never reach memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from forge.attention.kernels import PLAIN, choose, half_precision, head_width
from forge.notes import say

if TYPE_CHECKING:
    from torch import Tensor

    from forge.attention import Layout
    from forge.attention.sdpa import Choice
    from forge.config import Config


@dataclass(frozen=True)
class Flash:
    """On a GPU in half precision; on a CPU in float32 too, without dropout."""

    def problems(self, config: Config) -> Iterator[str]:
        yield from half_precision("flash", config)
        yield from head_width("flash", config, most=256, multiple=1)    # PyTorch pads to the kernel's multiple of 8

    def plan(self, layout: Layout) -> Choice:
        return choose("flash", layout)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, plan: Choice, dropout: float) -> Tensor:
        if not plan.exact or (dropout > 0 and not q.is_cuda and _say_no_dropout()):
            return PLAIN(q, k, v, plan, dropout)
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return PLAIN(q, k, v, plan, dropout)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]     # compiled code says it while it is traced
def _say_no_dropout() -> bool:
    say("attention=flash has no dropout on a CPU: training takes sdpa.")
    return True
