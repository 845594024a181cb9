"""Kernels of forge's own, each with a plain PyTorch twin that means the same and runs everywhere.

Whoever uses one asks `runs_on` first. Nothing here imports Triton before that says yes.
"""

from __future__ import annotations

import os
from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING

from forge.notes import say

if TYPE_CHECKING:
    import torch


def runs_on(device: torch.device, option: str, twin: str) -> bool:
    """Whether Triton kernels run on this device: an NVIDIA GPU since Volta, or any under Triton's interpreter.

    option: who asks. twin: what the run computes instead, which is said once.
    """
    if find_spec("triton") is None:
        say(f"{option} needs Triton, which is not installed: this run takes {twin}.")
        return False
    if interpreted():
        return True
    if device.type != "cuda" or not _is_volta(device):
        say(f"{option} has kernels for NVIDIA GPUs since Volta only: this run takes {twin}.")
        return False
    return True


def interpreted() -> bool:
    """Whether kernels run on the CPU, line by line, which is for tests."""
    return os.environ.get("TRITON_INTERPRET") == "1"


@cache
def _is_volta(device: torch.device) -> bool:
    import torch

    return torch.version.hip is None and torch.cuda.get_device_capability(device) >= (7, 0)
