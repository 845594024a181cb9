"""Matrix products of 8-bit numbers: float8_e4m3 (3 bits of mantissa, up to 448) forward, float8_e5m2 (2 bits, up to
57,344) for gradients, which span more (Micikevicius et al. 2022). Each tensor is scaled so that its largest number
becomes the format's largest; the scale is taken anew each time ("tensorwise, dynamic", as in torchao)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

FORWARD, GRADIENT = torch.float8_e4m3fn, torch.float8_e5m2
MULTIPLE = 16           # of sizes that torch._scaled_mm sums over or makes
ADA = (8, 9)            # the first compute capability with 8-bit units
SMALLEST = 1e-18        # a largest number below this counts as this, so that scales stay in float32's range


def has_units(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= ADA


def quantise(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(x * scale in the 8-bit dtype, 1 / scale as float32 scalar). What is not finite makes the result nan."""
    largest = torch.finfo(dtype).max
    scale = largest / x.abs().amax().float().clamp(min=SMALLEST)
    # Nothing to clamp: a rounding of float32 above the largest number is rounded to it, not to nan or infinity.
    return (x.float() * scale).to(dtype), scale.reciprocal()


def product(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor], made: torch.dtype, by_kernel: bool,
            fast: bool) -> Tensor:
    """[m, k] @ [k, n] of two quantised tensors, in dtype `made`. a is laid out by rows, b by columns.

    by_kernel: in 8 bits, by torch._scaled_mm; if not, the same factors in a wider format, which holds them exactly.
    fast: the kernel may add up in fewer bits.
    """
    (rows, row_scale), (columns, column_scale) = a, b
    if by_kernel:
        return torch._scaled_mm(rows, columns, scale_a=row_scale, scale_b=column_scale, out_dtype=made,
                                use_fast_accum=fast)
    wide = torch.float32 if rows.device.type == "cpu" else torch.bfloat16
    with torch.autocast(rows.device.type, enabled=False):
        return ((rows.to(wide) @ columns.to(wide)).float() * row_scale * column_scale).to(made)


class ScaledProduct(torch.autograd.Function):
    """(x [m, k], weight [n, k]) -> x @ weight.T [m, n] in bfloat16. Keeps both in 8 bits for backward.

    The gradient of x comes in bfloat16, rounded to x's dtype; that of the weight in the weight's.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, by_kernel: bool, fast: bool) -> Tensor:
        x8, w8 = quantise(x, FORWARD), quantise(weight, FORWARD)
        ctx.save_for_backward(*x8, *w8)
        ctx.by_kernel, ctx.dtypes = by_kernel, (x.dtype, weight.dtype)
        return product(x8, (w8[0].t(), w8[1]), torch.bfloat16, by_kernel, fast)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        x8, x_scale, w8, w_scale = ctx.saved_tensors
        g8, g_scale = quantise(gradients[0], GRADIENT)
        of_x = of_weight = None
        if ctx.needs_input_grad[0]:
            of_x = product((g8, g_scale), (_by_columns(w8), w_scale), torch.bfloat16, ctx.by_kernel, False)
            of_x = of_x.to(ctx.dtypes[0])
        if ctx.needs_input_grad[1]:
            of_weight = product((g8.t().contiguous(), g_scale), (_by_columns(x8), x_scale), ctx.dtypes[1],
                                ctx.by_kernel, False)
        return of_x, of_weight, None, None


def _by_columns(matrix: Tensor) -> Tensor:
    return matrix.t().contiguous().t()
