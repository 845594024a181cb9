"""The layers that the options of this group build."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from forge.operators import Activation


class FeedForward(nn.Module):
    """down(activation(up(x))), [..., width] -> [..., width].

    gated: `up` makes 2 * hidden features, which the activation turns into hidden.
    """

    def __init__(self, width: int, hidden: int, activation: Callable[[Tensor], Tensor], gated: bool,
                 bias: bool) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * hidden if gated else hidden, bias=bias)
        self.down = nn.Linear(hidden, width, bias=bias)
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.activation(self.up(x)))   # type: ignore[no-any-return]


class _LayerNorm(nn.Module):
    """Ba et al. 2016. Parameters: weight [width], bias [width]."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight, self.bias, self.eps = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width)), eps


class _RMSNorm(nn.Module):
    """Zhang and Sennrich 2019. Parameter: weight [width]."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(width)), eps


class NativeLayerNorm(_LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)


class NativeRMSNorm(_RMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        # A weight in another dtype than x, as under autocast, would send rms_norm down its slow, unfused path.
        return F.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), self.eps)


class HandwrittenLayerNorm(_LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        wide = at_least_float32(x)
        mean = wide.mean(-1, keepdim=True)
        variance = (wide - mean).square().mean(-1, keepdim=True)
        return ((wide - mean) / (variance + self.eps).sqrt() * self.weight + self.bias).to(x.dtype)


class HandwrittenRMSNorm(_RMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        wide = at_least_float32(x)
        mean_square = wide.square().mean(-1, keepdim=True)
        return (wide / (mean_square + self.eps).sqrt() * self.weight).to(x.dtype)


class NativeGeluNorm(NativeLayerNorm):
    """layer_norm(gelu_tanh(x))."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(F.gelu(x, approximate="tanh"))


class HandwrittenGeluNorm(HandwrittenLayerNorm):
    """layer_norm(gelu_tanh(x))."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(gelu_tanh(x))


def at_least_float32(x: Tensor) -> Tensor:
    """x in float32, or as it is where that is more precise: means of squares need it."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def gelu(x: Tensor) -> Tensor:
    """x times the normal distribution's cumulative probability (Hendrycks and Gimpel 2016)."""
    return 0.5 * x * (1 + torch.erf(x / math.sqrt(2)))


def gelu_tanh(x: Tensor) -> Tensor:
    """The same by the approximation that GPT-2 was trained with."""
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def swiglu(x: Tensor) -> Tensor:
    """silu(gate) * up, the halves of x in this order (Shazeer 2020)."""
    gate, up = x.chunk(2, dim=-1)
    return gate * torch.sigmoid(gate) * up


def _native_swiglu(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


INNER_EPS = 1e-5
Made = Callable[[int], Callable[[Tensor], Tensor]]          # from the number of features
NATIVE: dict[Activation, Made] = {
    "swiglu": lambda hidden: _native_swiglu, "gelu": lambda hidden: F.gelu,
    "gelu_tanh": lambda hidden: partial(F.gelu, approximate="tanh"),
    "gelu_tanh_norm": lambda hidden: NativeGeluNorm(hidden, INNER_EPS)}
HANDWRITTEN: dict[Activation, Made] = {
    "swiglu": lambda hidden: swiglu, "gelu": lambda hidden: gelu, "gelu_tanh": lambda hidden: gelu_tanh,
    "gelu_tanh_norm": lambda hidden: HandwrittenGeluNorm(hidden, INNER_EPS)}
