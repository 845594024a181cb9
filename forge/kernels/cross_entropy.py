"""Cross-entropy whose gradient takes the logits' place (the idea: llm.c's fused classifier; Liger Kernel).

Logits are the largest tensors of a language model. PyTorch writes them, reads them for the loss, and writes and reads
a gradient as large; here one kernel reads each row twice, the second time out of the cache, and writes it once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from forge.batch import IGNORED

BLOCK = 2048            # columns at a time: with these two, one pass each way over 50,257 columns takes an H200 the
WARPS = 4               # time of 1.5 copies; larger blocks, and a row held in registers, took longer


def overwrite(logits: Tensor, targets: Tensor, scale: Tensor, vocabulary: int) -> Tensor:
    """See forge.loss.overwriting.overwrite_plainly, the twin."""
    losses = torch.empty(logits.shape[0], dtype=torch.float32, device=logits.device)
    _overwrite[(logits.shape[0],)](
        logits, targets, scale, losses, logits.stride(0), IGNORED, vocabulary, logits.shape[1],
        BLOCK=min(BLOCK, triton.next_power_of_2(logits.shape[1])), num_warps=WARPS)
    return losses


@triton.jit     # type: ignore[untyped-decorator]
def _overwrite(  # type: ignore[no-untyped-def]
        logits, targets, scale, losses, stride, ignored: tl.constexpr, vocabulary: tl.constexpr, columns: tl.constexpr,
        BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride                                  # 64 bits: 43 rows of 1,024 tokens pass 2^31 logits
    target = tl.load(targets + row)
    offsets = tl.arange(0, BLOCK)
    if target == ignored:
        tl.store(losses + row, 0.0)
        for start in range(0, columns, BLOCK):
            column = start + offsets
            tl.store(logits + column, tl.zeros([BLOCK], logits.dtype.element_ty), mask=column < columns)
    else:
        wanted = tl.load(logits + target).to(tl.float32)    # now: in the second pass another warp may overwrite it
        peak = float("-inf")
        total = 0.0
        for start in range(0, columns, BLOCK):
            column = start + offsets
            value = tl.load(logits + column, mask=column < columns, other=float("-inf")).to(tl.float32)
            value = tl.where(column < vocabulary, value, float("-inf"))
            higher = tl.maximum(peak, tl.max(value))
            total = total * tl.exp(peak - higher) + tl.sum(tl.exp(value - higher))
            peak = higher
        log_sum = peak + tl.log(total)
        tl.store(losses + row, log_sum - wanted)
        factor = tl.load(scale).to(tl.float32)
        for start in range(0, columns, BLOCK):
            column = start + offsets
            value = tl.load(logits + column, mask=column < columns, other=float("-inf")).to(tl.float32)
            value = tl.where(column < vocabulary, value, float("-inf"))
            gradient = (tl.exp(value - log_sum) - tl.where(column == target, 1.0, 0.0)) * factor
            tl.store(logits + column, gradient.to(logits.dtype.element_ty), mask=column < columns)
