"""Whether operators=fused computes by forge's own kernels, or as its twins do."""

from __future__ import annotations

import torch

from forge.kernels import runs_on


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def has_kernels(device: torch.device, dtype: torch.dtype) -> bool:
    # float64 is what kernels are judged by.
    return dtype is not torch.float64 and runs_on(device, "operators=fused", "separate operators")
