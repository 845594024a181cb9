"""operators=fused: the activation of a feed-forward layer ends its matrix product, or begins the norm behind it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from forge.operators import Activation, Norm

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class Fused:
    """gelu_tanh: in the epilogue of `up`, and its derivative in that of `down`'s backward. gelu_tanh_norm: GELU and
    norm in one kernel each way. A gate on attention: sigmoid and product in one kernel each way. Everything else is as
    in operators=native."""

    fused_gate: ClassVar[bool] = True
    down_inside: ClassVar[str] = "gelu_tanh"    # with this activation `down` is one operator, and recomputed with it

    def norm(self, width: int, kind: Norm, eps: float) -> nn.Module:
        from forge.operators import layers

        return layers.NativeLayerNorm(width, eps) if kind == "layer" else layers.NativeRMSNorm(width, eps)

    def feed_forward(self, width: int, hidden: int, activation: Activation, bias: bool) -> nn.Module:
        from forge.notes import say
        from forge.operators import layers
        from forge.operators.epilogues import GeluFeedForward
        from forge.operators.inner_norm import GeluNorm

        if activation == "gelu_tanh":
            return GeluFeedForward(width, hidden, bias)
        if activation == "gelu_tanh_norm":
            return layers.FeedForward(width, hidden, GeluNorm(hidden, layers.INNER_EPS), False, bias)
        say(f"operators=fused has no kernel for {activation}: this model's runs as with operators=native.")
        return layers.FeedForward(width, hidden, layers.NATIVE[activation](hidden), activation == "swiglu", bias)
