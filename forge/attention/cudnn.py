"""cuDNN's fused attention: on Hopper GPUs faster than FlashAttention 2."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from forge.attention import Executes
from forge.attention.limits import half_precision, head_width, of_model, on_gpu

if TYPE_CHECKING:
    from torch import Tensor

    from forge.attention import Layout
    from forge.attention.fused import Choice
    from forge.config import Config

DROPOUT_STEPS = 16      # some of cuDNN's kernels know dropout in steps of 1/16 (pytorch/pytorch#174245)


@dataclass(frozen=True)
class CuDNN:
    """On a GPU in half precision. A CPU has no cuDNN: sdpa there."""

    executes: ClassVar[Executes] = Executes(scores_again=True, skips="causal")

    def problems(self, config: Config) -> Iterator[str]:
        yield from half_precision("cudnn", config)
        yield from head_width("cudnn", config, most=128, multiple=8)
        dropout = of_model(config, "dropout") or 0.0
        if on_gpu(config) and (dropout * DROPOUT_STEPS) % 1:
            near = max(1, round(dropout * DROPOUT_STEPS)) / DROPOUT_STEPS
            yield (f"attention=cudnn knows dropout in steps of 1/{DROPOUT_STEPS} only, and model.dropout is {dropout}: "
                   f"set model.dropout={near} or attention=flash.")

    def plan(self, layout: Layout) -> Choice:
        from forge.attention.fused import choose

        return choose(layout, "cudnn")

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, plan: Choice, dropout: float) -> Tensor:
        from forge.attention.fused import attend

        return attend(q, k, v, plan, dropout)
