"""Grouped-query attention for kernels that know only as many keys as queries."""

from __future__ import annotations

import torch
from torch import Tensor

HALF = (torch.float16, torch.bfloat16)


def repeat(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """k and v [B, kv_heads, T, head_width] with each head repeated until there are as many as in q."""
    times = q.shape[1] // k.shape[1]
    if times == 1:
        return k, v
    return k.repeat_interleave(times, dim=1), v.repeat_interleave(times, dim=1)


def compute_dtype(q: Tensor) -> torch.dtype:
    """The dtype a kernel will see: autocast decides where it is on."""
    device = q.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else q.dtype
