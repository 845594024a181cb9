"""operators: how normalisation and the feed-forward layer are computed. Parameters have the same names in all."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, Protocol, runtime_checkable

if TYPE_CHECKING:
    from torch import nn

Norm = Literal["rms", "layer"]
Activation = Literal["swiglu", "gelu", "gelu_tanh", "gelu_tanh_norm"]


@runtime_checkable
class Operators(Protocol):
    """An option that states `fused_gate = True` has a kernel for the gate on attention: see forge.operators.gate."""

    def norm(self, width: int, kind: Norm, eps: float) -> nn.Module:
        """[..., width] -> the same. Parameters: weight [width]; layer also bias [width]."""
        ...

    def feed_forward(self, width: int, hidden: int, activation: Activation, bias: bool) -> nn.Module:
        """[..., width] -> the same. Parameters: up.weight [hidden, width] (swiglu: [2 * hidden, width], gate first),
        down.weight [width, hidden], and their biases; gelu_tanh_norm: also activation.weight and .bias [hidden], of the
        layer norm (eps 1e-5) that follows its GELU (NormFormer, Shleifer et al. 2021)."""
        ...
