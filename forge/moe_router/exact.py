"""The gate's product in float32, from bfloat16 products on tensor cores: as exact, and several times faster.

A float32 number is the sum of three bfloat16 numbers, exactly (24 bits of significand, 8 in each); a product of two
bfloat16 numbers is exact in float32, in which tensor cores add. So x @ W^T of bfloat16 x and float32 W is three
products, computed as one. (The splitting: Henry, Tang & Heinecke 2019, arXiv 1904.06376.)
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def plain_product(x: Tensor, weight: Tensor) -> Tensor:
    """x [..., width] @ weight [experts, width]^T, in float32 or wider. The twin."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    return F.linear(x.to(dtype), weight.to(dtype))


def split_product(x: Tensor, weight: Tensor) -> Tensor:
    """The same of bfloat16 x and a weight in float32 or bfloat16. Gradients: of x within rounding to bfloat16, of the
    weight in float32."""
    logits: Tensor = _Split.apply(x.flatten(0, -2), weight)     # type: ignore[no-untyped-call]
    return logits.view(*x.shape[:-1], -1)


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        parts = _parts(weight, 3)
        return _sum(_wide(x, torch.cat(parts).T).chunk(len(parts), dim=1))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        x_grad = weight_grad = None
        parts = _parts(grads[0], 3)
        if ctx.needs_input_grad[0]:
            # The products of the second parts are below 2**-16, and what comes out is rounded to bfloat16.
            (high, low), rows = parts[:2], _parts(weight, 2)
            pairs = [(high, row) for row in rows] + [(low, rows[0])]
            x_grad = torch.cat([one for one, _ in pairs], dim=1) @ torch.cat([row for _, row in pairs])
        if ctx.needs_input_grad[1]:
            weight_grad = _sum(_wide(torch.cat(parts, dim=1).T, x).chunk(3)).to(weight.dtype)
        return x_grad, weight_grad


def _parts(tensor: Tensor, count: int) -> list[Tensor]:
    """bfloat16 tensors whose sum is the tensor, but for what `count` of them cannot hold. One where it is bfloat16."""
    return [tensor] if tensor.dtype == torch.bfloat16 else _split_up(tensor, count)


# An operator of our own, since torch.compile leaves out a rounding between two conversions, and then the second part is
# zero.
@torch.library.custom_op("forge::bfloat16_parts", mutates_args=())
def _split_up(tensor: Tensor, count: int) -> list[Tensor]:
    parts = [tensor.bfloat16()]
    while len(parts) < count:
        tensor = tensor - parts[-1]
        parts.append(tensor.bfloat16())
    return parts


@_split_up.register_fake
def _(tensor: Tensor, count: int) -> list[Tensor]:
    return [torch.empty_like(tensor, dtype=torch.bfloat16) for _ in range(count)]


def _wide(one: Tensor, other: Tensor) -> Tensor:
    """The product of bfloat16 matrices, in float32."""
    return torch.mm(one, other, out_dtype=torch.float32) if one.is_cuda else one.float() @ other.float()


def _sum(parts: tuple[Tensor, ...]) -> Tensor:
    """Small ones first."""
    total = parts[-1]
    for part in reversed(parts[:-1]):
        total = total + part
    return total
