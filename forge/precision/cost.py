"""What a number format costs on a device that has no units for it, measured and said."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from forge.notes import say

if TYPE_CHECKING:
    from torch import nn

AMPERE = (8, 0)             # the first compute capability with bfloat16 and TF32
WORTH_SAYING = 1.5          # times as long as float32; below, timing noise of a shared machine is as large
SIZE = 256                  # a layer of 256 x 256 over 256 tokens: long enough to time, short enough not to wait for


def say_cost(option: str, compute: str, model: nn.Module) -> None:
    """Once, where the model's device is slow or without effect in this format. Draws no random numbers."""
    device = next(model.parameters()).device
    if compute == "tf32":
        if device.type != "cuda" or torch.cuda.get_device_capability(device) < AMPERE:
            say(f"precision={option} has no effect here: TF32 is a format of NVIDIA GPUs of compute capability "
                f"{AMPERE[0]}.{AMPERE[1]} and later.")
    elif device.type == "cpu":
        factor = linear_ms(getattr(torch, compute)) / linear_ms(torch.float32)
        if factor > WORTH_SAYING:
            say(f"precision={option}: on this CPU {compute} matrix products take {factor:.1f} times as long as "
                f"float32.")
    elif compute == "bfloat16" and torch.cuda.get_device_capability(device) < AMPERE:
        say(f"precision={option}: this GPU has no bfloat16 units, so products are slow: precision=fp16 suits it.")


def linear_ms(dtype: torch.dtype) -> float:
    """Milliseconds of one linear layer, forward and backward, on the CPU: the best of three."""
    tokens, weight = (torch.ones(SIZE, SIZE, dtype=dtype, requires_grad=True) for _ in range(2))
    grad = torch.ones(SIZE, SIZE, dtype=dtype)
    times = []
    for _ in range(4):                                  # the first one sets up the kernels
        begun = time.perf_counter()
        F.linear(tokens, weight).backward(grad)
        times.append(time.perf_counter() - begun)
    return min(times[1:]) * 1e3
