"""The whole model as one graph, with every matrix product timed in several forms before the best is taken."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class MaxAutotune:
    """Minutes of timing before the first step. dynamic, fullgraph: as in whole."""

    dynamic: bool
    fullgraph: bool

    def __call__(self, model: nn.Module) -> nn.Module:
        from forge.compile.graph import compile_whole

        # Its other form replays CUDA graphs, whose results the next micro-batch overwrites while they are being summed.
        return compile_whole("max_autotune", model, dynamic=self.dynamic, fullgraph=self.fullgraph,
                             mode="max-autotune-no-cudagraphs")
