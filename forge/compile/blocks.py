"""Each block of the model is a graph of its own, and equal blocks share one compilation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class Blocks:
    """dynamic: one graph for all shapes, instead of one per shape. fullgraph: an error where a block needs more than
    one graph. mode: max-autotune-no-cudagraphs times every matrix product in several forms and takes the best."""

    dynamic: bool
    fullgraph: bool
    mode: Literal["default", "max-autotune-no-cudagraphs"]

    def __call__(self, model: nn.Module) -> nn.Module:
        from forge.compile.graph import compile_blocks

        return compile_blocks("blocks", model, dynamic=self.dynamic, fullgraph=self.fullgraph, mode=self.mode)
