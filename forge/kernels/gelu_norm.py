"""layer_norm(gelu(h)), and its whole backward in one kernel: norm, then activation, without a tensor between them.

Separate operators write gelu(h), and in backward its gradient, only to read them again. Here gelu(h) is computed anew
where it is needed, so a row is read once and written once each way. GELU by the tanh approximation.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

PROGRAMS = 528          # four a multiprocessor of an H200; each adds up its rows' share of the weights' gradients
WARPS = 8


def gelu_norm(h: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """h [N, width] -> (layer_norm(gelu(h)) [N, width], mean [N], 1 / deviation [N]); the twin is
    forge.operators.layers.NativeGeluNorm."""
    y = torch.empty_like(h)
    wide = torch.float64 if h.dtype is torch.float64 else torch.float32
    mean, scale = (torch.empty(h.shape[0], dtype=wide, device=h.device) for _ in range(2))
    _forward[(h.shape[0],)](h, weight, bias, y, mean, scale, h.stride(0), eps, h.shape[1], _wide(h),
                            BLOCK=triton.next_power_of_2(h.shape[1]), num_warps=WARPS)
    return y, mean, scale


def gelu_norm_backward(gradient: Tensor, h: Tensor, weight: Tensor, mean: Tensor,
                       scale: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """gradient, h [N, width] -> the gradients by h [N, width], weight and bias [width]."""
    rows, width = h.shape
    programs = min(rows, PROGRAMS)
    result = torch.empty_like(h)
    shares = torch.empty(2, programs, width, dtype=mean.dtype, device=h.device)
    _backward[(programs,)](gradient, h, weight, mean, scale, result, shares[0], shares[1], gradient.stride(0),
                           h.stride(0), rows, triton.cdiv(rows, programs), programs, width, _wide(h),
                           BLOCK=triton.next_power_of_2(width), num_warps=WARPS)
    return result, shares[0].sum(0).to(weight.dtype), shares[1].sum(0).to(weight.dtype)


def _wide(h: Tensor) -> tl.dtype:
    return tl.float64 if h.dtype is torch.float64 else tl.float32


@triton.jit
def _gelu(h):  # type: ignore[no-untyped-def]
    """(gelu(h), its derivative)."""
    inner = 0.7978845608028654 * (h + 0.044715 * h * h * h)
    tanh = 1 - 2 / (tl.exp(2 * inner) + 1)
    slope = 0.7978845608028654 * (1 + 3 * 0.044715 * h * h)
    return 0.5 * h * (1 + tanh), 0.5 * (1 + tanh) + 0.5 * h * (1 - tanh * tanh) * slope


@triton.jit     # type: ignore[untyped-decorator]
def _forward(  # type: ignore[no-untyped-def]
        h, weight, bias, y, means, scales, stride, eps, width: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = column < width
    value, _ = _gelu(tl.load(h + row * stride + column, mask=mask, other=0.0).to(WIDE))
    mean = tl.sum(value) / width
    centred = tl.where(mask, value - mean, 0.0)
    scale = 1 / tl.sqrt(tl.sum(centred * centred) / width + eps)
    tl.store(means + row, mean)
    tl.store(scales + row, scale)
    result = (centred * scale * tl.load(weight + column, mask=mask, other=0.0).to(WIDE)
              + tl.load(bias + column, mask=mask, other=0.0).to(WIDE))
    tl.store(y + row * width + column, result.to(y.dtype.element_ty), mask=mask)


@triton.jit     # type: ignore[untyped-decorator]
def _backward(  # type: ignore[no-untyped-def]
        gradient, h, weight, means, scales, result, by_weight, by_bias, gradient_stride, stride, rows: tl.constexpr,
        rounds: tl.constexpr, programs: tl.constexpr, width: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr):
    program = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    mask = column < width
    scaled_by = tl.load(weight + column, mask=mask, other=0.0).to(WIDE)
    weight_share = tl.zeros([BLOCK], WIDE)
    bias_share = tl.zeros([BLOCK], WIDE)
    for turn in range(rounds):
        row = (turn * programs + program).to(tl.int64)
        if row < rows:
            incoming = tl.load(gradient + row * gradient_stride + column, mask=mask, other=0.0).to(WIDE)
            value, slope = _gelu(tl.load(h + row * stride + column, mask=mask, other=0.0).to(WIDE))
            scale = tl.load(scales + row)
            normed = tl.where(mask, (value - tl.load(means + row)) * scale, 0.0)
            weight_share += incoming * normed
            bias_share += incoming
            incoming *= scaled_by
            along = tl.sum(incoming * normed) / width
            through = (incoming - tl.sum(incoming) / width - normed * along) * scale * slope
            tl.store(result + row * width + column, through.to(result.dtype.element_ty), mask=mask)
    tl.store(by_weight + program * width + column, weight_share, mask=mask)
    tl.store(by_bias + program * width + column, bias_share, mask=mask)
