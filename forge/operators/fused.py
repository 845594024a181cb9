"""operators=fused: the activation of a feed-forward layer ends its matrix product."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from forge.operators import Activation, Norm

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class Fused:
    """GELU, by tanh, in the epilogue of `up`, and its derivative in that of `down`'s backward. Norms and other
    activations are those of operators=native."""

    def norm(self, width: int, kind: Norm, eps: float) -> nn.Module:
        from forge.operators import layers

        return layers.NativeLayerNorm(width, eps) if kind == "layer" else layers.NativeRMSNorm(width, eps)

    def feed_forward(self, width: int, hidden: int, activation: Activation, bias: bool) -> nn.Module:
        from forge.notes import say
        from forge.operators import layers
        from forge.operators.epilogues import GeluFeedForward

        if activation == "gelu_tanh":
            return GeluFeedForward(width, hidden, bias)
        say(f"operators=fused knows gelu_tanh only: this model's {activation} runs as with operators=native.")
        return layers.FeedForward(width, hidden, layers.NATIVE[activation], activation == "swiglu", bias)
