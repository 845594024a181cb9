"""Rotary position embedding."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from forge.model.positions import Llama3Scaling, Rotary, YaRN


class RotaryEmbedding(nn.Module):
    """Positions [B or 1, T] -> rotation [2, B or 1, 1, T, head_width / 2] float32: cosines and sines."""

    frequencies: Tensor     # [head_width / 2] float32, radians a token

    def __init__(self, head_width: int, rotary: Rotary) -> None:
        super().__init__()
        self.head_width, self.rotary = head_width, rotary
        self.register_buffer("frequencies", self._make(None), persistent=False)

    def forward(self, positions: Tensor) -> Tensor:
        angles = positions.unsqueeze(-1).float() * self.frequencies
        rotation = torch.stack([angles.cos(), angles.sin()]).unsqueeze(2)
        scaling = self.rotary.scaling
        return rotation * scaling.amplitude if isinstance(scaling, YaRN) else rotation

    def _make(self, device: torch.device | None) -> Tensor:
        exponents = torch.arange(0, self.head_width, 2, dtype=torch.float32, device=device) / self.head_width
        frequencies = 1.0 / self.rotary.base**exponents
        if self.rotary.scaling is None:
            return frequencies
        if isinstance(self.rotary.scaling, YaRN):
            return stretch_by_place(frequencies, self.rotary.scaling, self.rotary.base)
        return stretch(frequencies, self.rotary.scaling)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """A model that is cast keeps exact frequencies: bfloat16 would put distant tokens radians off."""
        super()._apply(fn, recurse)     # type: ignore[no-untyped-call]
        self.frequencies = self._make(self.frequencies.device)
        return self


def rotate(x: Tensor, rotation: Tensor, interleaved: bool) -> Tensor:
    """x: [B, heads, T, head_width], in float32. The first half of a head is rotated with the second (Hugging Face's
    rotate_half convention), or each number with its neighbour. Then the result has first all first and then all second
    numbers: scores do not change where queries and keys change order alike."""
    cos, sin = rotation
    first, second = (x[..., 0::2], x[..., 1::2]) if interleaved else x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)


def stretch(frequencies: Tensor, scaling: Llama3Scaling) -> Tensor:
    """Frequencies for contexts `factor` times as long, as Llama 3.1 scales them."""
    wavelengths = 2 * math.pi / frequencies
    rotations = scaling.original_max_length / wavelengths       # in the original context
    keep = (rotations - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    keep = keep.clamp(0, 1)
    return (1 - keep) * frequencies / scaling.factor + keep * frequencies


def stretch_by_place(frequencies: Tensor, scaling: YaRN, base: float) -> Tensor:
    """The same as YaRN scales them."""
    pairs = len(frequencies)

    def place(rotations: float) -> float:
        """Of the pair that turns so often in the original context."""
        return pairs * math.log(scaling.original_max_length / (rotations * 2 * math.pi)) / math.log(base)

    first, last = place(scaling.beta_fast), place(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * pairs - 1)
    places = torch.arange(pairs, dtype=torch.float32, device=frequencies.device)
    slowed = ((places - first) / (last - first or 0.001)).clamp(0, 1)
    return slowed * frequencies / scaling.factor + (1 - slowed) * frequencies
