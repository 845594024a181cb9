"""A feed-forward layer whose GELU, and whose GELU's derivative, end the matrix products beside them."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from forge.notes import say


class GeluFeedForward(nn.Module):
    """down(gelu_tanh(up(x))), [..., width] -> [..., width]. Parameters as in forge.operators.layers.FeedForward."""

    def __init__(self, width: int, hidden: int, bias: bool) -> None:
        super().__init__()
        self.up = nn.Linear(width, hidden, bias=bias)
        self.down = nn.Linear(hidden, width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        device = x.device.type
        operands = [x, self.up.weight, self.up.bias, self.down.weight, self.down.bias]
        if torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)
            operands = [None if operand is None else operand.to(dtype) for operand in operands]
        rows = operands[0].flatten(0, -2)
        with torch.autocast(device, enabled=False):
            return _Gelu.apply(rows, *operands[1:]).view(x.shape)     # type: ignore[no-any-return, no-untyped-call]


class _Gelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, up: Tensor, up_bias: Tensor | None, down: Tensor,
                down_bias: Tensor | None) -> Tensor:
        activated, pre = gelu_product(x, up, up_bias)
        ctx.save_for_backward(x, up, down, activated, pre)
        return F.linear(activated, down, down_bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, up, down, activated, pre = ctx.saved_tensors
        wanted = ctx.needs_input_grad                       # frozen weights cost no product
        gradient = gradient.contiguous()
        hidden = gelu_gradient_product(gradient, down, pre) if any(wanted[:3]) else pre
        return (hidden @ up if wanted[0] else None, hidden.t() @ x if wanted[1] else None,
                hidden.sum(0) if wanted[2] else None, gradient.t() @ activated if wanted[3] else None,
                gradient.sum(0) if wanted[4] else None)


@torch.library.custom_op("forge::gelu_product", mutates_args=())
def gelu_product(x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """x [N, D], weight [H, D], bias [H] -> (gelu_tanh(pre), pre), pre = x weight^T + bias, both [N, H]."""
    if _in_epilogue(weight, x, bias):
        from forge.kernels import cublaslt

        return cublaslt.gelu_product(x, weight, bias)
    return gelu_product_plainly(x, weight, bias)


@gelu_product.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape[0], weight.shape[0]), x.new_empty(x.shape[0], weight.shape[0])


@torch.library.custom_op("forge::gelu_gradient_product", mutates_args=())
def gelu_gradient_product(gradient: Tensor, weight: Tensor, pre: Tensor) -> Tensor:
    """gradient [N, D], weight [D, H], pre [N, H] -> (gradient weight) gelu_tanh'(pre) [N, H]."""
    if _in_epilogue(weight, gradient, pre):
        from forge.kernels import cublaslt

        return cublaslt.gelu_gradient_product(gradient, weight, pre)
    return gelu_gradient_product_plainly(gradient, weight, pre)


@gelu_gradient_product.register_fake
def _(gradient: Tensor, weight: Tensor, pre: Tensor) -> Tensor:
    return torch.empty_like(pre)


def gelu_product_plainly(x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """The twin of forge.kernels.cublaslt.gelu_product."""
    pre = F.linear(x, weight, bias)
    return F.gelu(pre, approximate="tanh"), pre


def gelu_gradient_product_plainly(gradient: Tensor, weight: Tensor, pre: Tensor) -> Tensor:
    """The twin of forge.kernels.cublaslt.gelu_gradient_product."""
    through: Tensor = torch.ops.aten.gelu_backward(gradient @ weight, pre, approximate="tanh")
    return through


def _in_epilogue(weight: Tensor, *others: Tensor | None) -> bool:
    if not weight.is_cuda or torch.version.hip is not None:
        say("operators=fused has kernels for an NVIDIA GPU only: this run takes their plain twin.")
        return False
    from forge.kernels import cublaslt

    if cublaslt.fits(weight, *others):
        return True
    say(f"operators=fused works in half precision and on widths that are multiples of {cublaslt.ALIGNED}: this run "
        f"takes its plain twin.")
    return False
