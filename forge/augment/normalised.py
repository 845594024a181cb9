"""Pictures as a model is used to them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor


def normalised(pictures: Tensor, mean: Sequence[float], std: Sequence[float]) -> Tensor:
    """(pictures - mean) / std of [P, 3, H, W] float32, each colour by its own."""
    factor = _column(tuple(1 / value for value in std), pictures.device)
    offset = _column(tuple(-low / value for low, value in zip(mean, std, strict=True)), pictures.device)
    return torch.addcmul(offset, pictures, factor)


@cache
def _column(values: tuple[float, ...], device: torch.device) -> Tensor:
    """[3, 1, 1], once a device: making it there waits for the device."""
    return torch.tensor(values, dtype=torch.float32, device=device)[:, None, None]
