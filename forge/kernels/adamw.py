"""AdamW over all parameters in one launch, with float32 masters of half-precision weights where they are kept.

A number costs 28 bytes of traffic (gradient, master and both moments read; weight, master and moments written), which
is all an update can cost where memory bounds it. The pointers of all tensors travel in a table.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096            # numbers of one tensor that one program updates
ALIGNED = 16            # bytes: what whole vectors are loaded from


class Tables:
    """What one launch is told about the tensors of an update, on the device: sent again only when it has changed.

    sizes: numbers in each parameter.
    """

    def __init__(self, sizes: list[int], device: torch.device) -> None:
        self.device = device
        chunks = [(index, start) for index, size in enumerate(sizes) for start in range(0, size, BLOCK)]
        self.sizes = torch.tensor(sizes, device=device)
        self.size_step = ALIGNED if all(size % ALIGNED == 0 for size in sizes) else 1
        self.chunks = torch.tensor(chunks, dtype=torch.int64, device=device)
        self._sent: dict[str, tuple[list[Any], Tensor]] = {}

    def send(self, name: str, values: list[Any], dtype: torch.dtype) -> Tensor:
        sent = self._sent.get(name)
        if sent is None or sent[0] != values:
            table = torch.tensor(values, dtype=dtype)
            table = table.pin_memory() if self.device.type == "cuda" else table
            self._sent[name] = sent = (values, table.to(self.device, non_blocking=True))
        return sent[1]


def adamw(tables: Tables, rows: list[tuple[Tensor, ...]], settings: list[tuple[float, float]], corrections: Tensor,
          divisor: Tensor, skip: Tensor, how: dict[str, float]) -> None:
    """Loshchilov & Hutter 2019, as torch.optim.AdamW computes it, which is the twin.

    rows: (gradient, weight, master, exp_avg, exp_avg_sq) of each parameter, contiguous; the last three float32, and
        master the weight itself where there is none. settings: (learning rate, weight decay) of each.
    corrections: [2], 1 - beta ** step of both betas. divisor: scalar, of the gradients. skip: scalar; not 0: nothing
    changes. how: beta1, beta2, eps.
    """
    for group in zip(*rows, strict=True):
        assert all(tensor.dtype is group[0].dtype and tensor.is_contiguous() for tensor in group)
    assert all(tensor.dtype is torch.float32 for tensor in rows[0][2:])
    pointers = [[tensor.data_ptr() for tensor in row] for row in rows]
    aligned = all(pointer % ALIGNED == 0 for row in pointers for pointer in row)
    gradient, weight, master, *_ = rows[0]
    _adamw[(len(tables.chunks),)](
        tables.send("pointers", pointers, torch.int64), tables.send("settings", settings, torch.float32),
        tables.chunks, tables.sizes, corrections, divisor, skip, how["beta1"], how["beta2"], how["eps"],
        GRADIENT=_triton_type(gradient), WEIGHT=_triton_type(weight), MASTER=master is not weight,
        ALIGN=ALIGNED if aligned else 1, SIZE_STEP=tables.size_step, BLOCK=BLOCK, num_warps=8)


@triton.jit     # type: ignore[untyped-decorator]
def _adamw(  # type: ignore[no-untyped-def]
        table, settings, chunks, sizes, corrections, divisor, skip, beta1, beta2, eps, GRADIENT: tl.constexpr,
        WEIGHT: tl.constexpr, MASTER: tl.constexpr, ALIGN: tl.constexpr, SIZE_STEP: tl.constexpr,
        BLOCK: tl.constexpr):
    if tl.load(skip) != 0:
        return
    program = tl.program_id(0).to(tl.int64)
    index = tl.load(chunks + 2 * program)
    offsets = tl.multiple_of(tl.load(chunks + 2 * program + 1), BLOCK) + tl.arange(0, BLOCK)
    mask = offsets < tl.multiple_of(tl.load(sizes + index), SIZE_STEP)   # or no load would be wider than a number
    table += index * 5
    gradients = tl.multiple_of(tl.load(table).to(tl.pointer_type(GRADIENT)), ALIGN)
    weights = tl.multiple_of(tl.load(table + 1).to(tl.pointer_type(WEIGHT)), ALIGN)
    masters = tl.multiple_of(tl.load(table + 2).to(tl.pointer_type(tl.float32)), ALIGN)
    means = tl.multiple_of(tl.load(table + 3).to(tl.pointer_type(tl.float32)), ALIGN)
    squares = tl.multiple_of(tl.load(table + 4).to(tl.pointer_type(tl.float32)), ALIGN)

    gradient = tl.load(gradients + offsets, mask=mask, other=0.0).to(tl.float32) / tl.load(divisor)
    value = tl.load(masters + offsets, mask=mask, other=0.0)
    mean = tl.load(means + offsets, mask=mask, other=0.0)
    square = tl.load(squares + offsets, mask=mask, other=0.0)
    rate = tl.load(settings + 2 * index)
    value -= rate * tl.load(settings + 2 * index + 1) * value
    mean += (1 - beta1) * (gradient - mean)
    square = beta2 * square + (1 - beta2) * gradient * gradient
    mean_correction = tl.load(corrections).to(tl.float32)
    square_correction = tl.load(corrections + 1).to(tl.float32)
    value -= rate / mean_correction * mean / (tl.sqrt(square / square_correction) + eps)
    tl.store(means + offsets, mean, mask=mask)
    tl.store(squares + offsets, square, mask=mask)
    tl.store(masters + offsets, value, mask=mask)
    if MASTER:
        tl.store(weights + offsets, value.to(WEIGHT), mask=mask)


def _triton_type(tensor: Tensor) -> Any:
    return {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}[tensor.dtype]
