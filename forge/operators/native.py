"""operators=native: PyTorch's own kernels, one for each operator."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from forge.operators import Activation, Norm

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class Native:
    """torch.nn.functional: layer_norm, rms_norm, gelu, silu."""

    def norm(self, width: int, kind: Norm, eps: float) -> nn.Module:
        from forge.operators import layers

        return layers.NativeLayerNorm(width, eps) if kind == "layer" else layers.NativeRMSNorm(width, eps)

    def feed_forward(self, width: int, hidden: int, activation: Activation, bias: bool) -> nn.Module:
        from forge.operators import layers

        return layers.FeedForward(width, hidden, layers.NATIVE[activation](hidden), activation == "swiglu", bias)
