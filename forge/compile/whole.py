"""Everything between the tokens and the loss is one graph."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class Whole:
    """dynamic: one graph for all shapes, instead of one per shape. fullgraph: an error where more than one graph is
    needed."""

    dynamic: bool
    fullgraph: bool

    def __call__(self, model: nn.Module) -> nn.Module:
        from forge.compile.graph import compile_whole

        return compile_whole("whole", model, dynamic=self.dynamic, fullgraph=self.fullgraph, mode="default")
