"""What kernels ask about the device they run on."""

from __future__ import annotations

from functools import cache

import torch

from forge.kernels import interpreted


@cache
def num_multiprocessors(device: torch.device) -> int:
    """Programs of a grid that runs all at once. In the interpreter a few, so that programs take several turns."""
    if interpreted():
        return 3
    return torch.cuda.get_device_properties(device).multi_processor_count
