"""heads * sigmoid(gate) in one kernel each way: attention's output, gated, in the order in which it is projected out.

Separate operators copy the heads into that order, write the sigmoid and the product, and keep both for backward. Here
heads and gate are read once and the product written once; backward computes the sigmoid anew, so nothing else is kept.
Everything is computed in float32.

Legend: B batch, T tokens, H heads, D width of a head; G: gates of a token, H (one a head) or H * D.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 4096             # numbers a program holds at once, of each operand
WARPS = 4


def gated(heads: Tensor, gate: Tensor) -> Tensor:
    """heads [B, H, T, D] of any strides but D's, gate [B, T, G] contiguous -> [B, T, H * D]; the twin is
    forge.operators.gate.gated_plainly."""
    batch, num_heads, length, width = heads.shape
    result = torch.empty(batch, length, num_heads * width, dtype=heads.dtype, device=heads.device)
    block_heads, block = _blocks(num_heads, width)
    _forward[(batch * length, triton.cdiv(num_heads, block_heads))](
        heads, gate, result, *heads.stride()[:3], length, num_heads, width, ONE=gate.shape[-1] == num_heads,
        HEADS=block_heads, BLOCK=block, num_warps=WARPS)
    return result


def gated_backward(gradient: Tensor, heads: Tensor, gate: Tensor) -> tuple[Tensor, Tensor]:
    """gradient [B, T, H * D] contiguous -> those by heads [B, H, T, D], in memory as [B, T, H, D], and by gate."""
    batch, num_heads, length, width = heads.shape
    by_heads = torch.empty(batch, length, num_heads, width, dtype=heads.dtype, device=heads.device).transpose(1, 2)
    by_gate = torch.empty_like(gate)
    block_heads, block = _blocks(num_heads, width)
    _backward[(batch * length, triton.cdiv(num_heads, block_heads))](
        gradient, heads, gate, by_heads, by_gate, *heads.stride()[:3], length, num_heads, width,
        ONE=gate.shape[-1] == num_heads, HEADS=block_heads, BLOCK=block, num_warps=WARPS)
    return by_heads, by_gate


def _blocks(num_heads: int, width: int) -> tuple[int, int]:
    """(heads a program, numbers a head), powers of two."""
    block = triton.next_power_of_2(width)
    return min(triton.next_power_of_2(num_heads), max(1, TILE // block)), block


@triton.jit     # type: ignore[untyped-decorator]
def _places(  # type: ignore[no-untyped-def]
        of_batch, of_head, of_token, length, heads, width, HEADS: tl.constexpr, BLOCK: tl.constexpr):
    """(row, head [HEADS, 1], offsets into heads, offsets into rows of H * D, mask)."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    number = tl.arange(0, BLOCK)[None, :]
    inside = (row // length) * of_batch + head * of_head + (row % length) * of_token + number
    return row, head, inside, row * heads * width + head * width + number, (head < heads) & (number < width)


@triton.jit     # type: ignore[untyped-decorator]
def _forward(  # type: ignore[no-untyped-def]
        values, gate, result, of_batch, of_head, of_token, length, heads, width, ONE: tl.constexpr,
        HEADS: tl.constexpr, BLOCK: tl.constexpr):
    row, head, inside, flat, mask = _places(of_batch, of_head, of_token, length, heads, width, HEADS, BLOCK)
    if ONE:
        logit = tl.load(gate + row * heads + head, mask=head < heads, other=0.0).to(tl.float32)
    else:
        logit = tl.load(gate + flat, mask=mask, other=0.0).to(tl.float32)
    value = tl.load(values + inside, mask=mask, other=0.0).to(tl.float32)
    tl.store(result + flat, (value / (1 + tl.exp(-logit))).to(result.dtype.element_ty), mask=mask)


@triton.jit     # type: ignore[untyped-decorator]
def _backward(  # type: ignore[no-untyped-def]
        gradient, values, gate, by_values, by_gate, of_batch, of_head, of_token, length, heads, width,
        ONE: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr):
    row, head, inside, flat, mask = _places(of_batch, of_head, of_token, length, heads, width, HEADS, BLOCK)
    incoming = tl.load(gradient + flat, mask=mask, other=0.0).to(tl.float32)
    value = tl.load(values + inside, mask=mask, other=0.0).to(tl.float32)
    if ONE:
        logit = tl.load(gate + row * heads + head, mask=head < heads, other=0.0).to(tl.float32)
    else:
        logit = tl.load(gate + flat, mask=mask, other=0.0).to(tl.float32)
    opened = 1 / (1 + tl.exp(-logit))
    tl.store(by_values + flat, (incoming * opened).to(by_values.dtype.element_ty), mask=mask)
    slope = opened * (1 - opened)
    if ONE:
        shared = tl.sum(incoming * value, axis=1)[:, None] * slope
        tl.store(by_gate + row * heads + head, shared.to(by_gate.dtype.element_ty), mask=head < heads)
    else:
        tl.store(by_gate + flat, (incoming * value * slope).to(by_gate.dtype.element_ty), mask=mask)
