"""GELU and the layer norm after it as one operator, whose backward is one kernel."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from forge.operators.kernels import has_kernels
from forge.operators.layers import NativeGeluNorm


class GeluNorm(NativeGeluNorm):
    """layer_norm(gelu_tanh(x)), [..., width] -> the same. Parameters: weight, bias [width]."""

    def forward(self, x: Tensor) -> Tensor:
        if not has_kernels(x.device, x.dtype):
            return super().forward(x)
        rows = x.flatten(0, -2)
        normed: Tensor = _GeluNorm.apply(rows, self.weight, self.bias, self.eps)    # type: ignore[no-untyped-call]
        return normed.view(x.shape)


class _GeluNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, h: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        y, mean, scale = gelu_norm(h.contiguous(), weight, bias, eps)
        ctx.save_for_backward(h, weight, mean, scale)
        return y                # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        h, weight, mean, scale = ctx.saved_tensors
        return (*gelu_norm_backward(gradient.contiguous(), h.contiguous(), weight, mean, scale), None)


@torch.library.custom_op("forge::gelu_norm", mutates_args=())
def gelu_norm(h: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """See forge.kernels.gelu_norm."""
    from forge.kernels import gelu_norm as kernel

    return kernel.gelu_norm(h, weight, bias, eps)


@gelu_norm.register_fake
def _(h: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    wide = torch.promote_types(h.dtype, torch.float32)
    return torch.empty_like(h), h.new_empty(h.shape[0], dtype=wide), h.new_empty(h.shape[0], dtype=wide)


@torch.library.custom_op("forge::gelu_norm_backward", mutates_args=())
def gelu_norm_backward(gradient: Tensor, h: Tensor, weight: Tensor, mean: Tensor,
                       scale: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """See forge.kernels.gelu_norm."""
    from forge.kernels import gelu_norm as kernel

    return kernel.gelu_norm_backward(gradient, h, weight, mean, scale)


@gelu_norm_backward.register_fake
def _(gradient: Tensor, h: Tensor, weight: Tensor, mean: Tensor, scale: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(h), torch.empty_like(weight), torch.empty_like(weight)
