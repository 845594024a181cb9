"""operators=handwritten: every operator as its formula, one elementary operation after the other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from forge.operators import Activation, Norm

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class Handwritten:
    """The plain twin of the other options, and the first step of the published speed-ups: slow, and easy to read."""

    def norm(self, width: int, kind: Norm, eps: float) -> nn.Module:
        from forge.operators import layers

        return layers.HandwrittenLayerNorm(width, eps) if kind == "layer" else layers.HandwrittenRMSNorm(width, eps)

    def feed_forward(self, width: int, hidden: int, activation: Activation, bias: bool) -> nn.Module:
        from forge.operators import layers

        return layers.FeedForward(width, hidden, layers.HANDWRITTEN[activation](hidden), activation == "swiglu", bias)
