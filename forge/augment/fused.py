"""Crop, flip and affine as one sampling of the source, and the colours as one chain of pointwise operations."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

if TYPE_CHECKING:
    from forge.augment.draws import Draws

GREY = (0.299, 0.587, 0.114)        # ITU-R BT.601


def fused(pictures: Tensor, draws: Draws, size: int) -> Tensor:
    """[P, 3, size, size] float32 in 0..1, of pictures [P, H, W, 3] uint8."""
    if not len(pictures):
        return pictures.new_zeros(0, 3, size, size, dtype=torch.float32)
    return jittered(sampled(pictures, draws, size), draws)


def sampled(pictures: Tensor, draws: Draws, size: int) -> Tensor:
    """The crop, resized, flipped and warped, [P, 3, size, size] float32 in 0..1.

    Every pixel is a mean of bilinear samples around its place in the source. They are spread so that, with the
    triangle of the bilinear sample itself, they have the variance of the triangle with which Pillow and torch resize
    with antialias: r^2 / 6 for a shrinking by r. Where nothing shrinks they fall together, which is bilinear sampling.
    """
    height, width = pictures.shape[1:3]
    x, y = _places(draws, size)
    weight = _cover(x, size) * _cover(y, size)
    x = torch.where(draws.flip[:, None, None], size - 1 - x, x)
    across = _Axis(draws.left, draws.width, width, size)
    down = _Axis(draws.top, draws.height, height, size)
    x, y = across.source(x), down.source(y)
    source = pictures.permute(0, 3, 1, 2).float()
    places = [[axis.normal(place + offset) for offset in axis.offsets()] for axis, place in ((across, x), (down, y))]
    total = torch.zeros(len(pictures), 3, size, size, dtype=torch.float32, device=pictures.device)
    for right, to_right in enumerate(places[0]):
        for below, further_down in enumerate(places[1]):
            _add(total, source, torch.stack([to_right, further_down], dim=3),
                 (right < across.num_samples) & (below < down.num_samples))
    return total.mul_((weight / (255 * across.num_samples * down.num_samples)[:, None, None])[:, None])


def _add(total: Tensor, source: Tensor, grid: Tensor, wanted: Tensor) -> None:
    """Adds what is at the places of the grid to those pictures that want this sample, [P] bool. A GPU would have to be
    waited for to tell which; so it samples them all."""
    if total.device.type != "cpu":
        total += functional.grid_sample(source, grid, "bilinear", "border", align_corners=False) \
            * wanted[:, None, None, None]
    elif wanted.all():
        total += functional.grid_sample(source, grid, "bilinear", "border", align_corners=False)
    elif len(rows := wanted.nonzero()[:, 0]):
        seen = functional.grid_sample(source[rows], grid[rows], "bilinear", "border", align_corners=False)
        total.index_add_(0, rows, seen)


def _places(draws: Draws, size: int) -> tuple[Tensor, Tensor]:
    """[P, size, size] float32: where in the cropped picture each pixel of the result comes from, in its pixels.

    The inverse of: shear, then scale and rotate clockwise, both about the centre, then translate.
    """
    angle, shear = draws.angle * (math.pi / 180), (draws.shear * (math.pi / 180)).tan()
    cos, sin = angle.cos() / draws.scale, angle.sin() / draws.scale
    middle = (size - 1) / 2
    rows = ((cos - shear * sin, sin + shear * cos), (-sin, cos))
    out = torch.arange(size, device=draws.angle.device, dtype=torch.float32) - middle
    columns = []
    for a, b in rows:
        shift = middle - a * draws.right - b * draws.down
        columns.append(_each(a) * out[None, None, :] + _each(b) * out[None, :, None] + _each(shift))
    return columns[0], columns[1]


def _each(values: Tensor) -> Tensor:
    """[P, 1, 1] float32."""
    return values.float()[:, None, None]


def _cover(place: Tensor, size: int) -> Tensor:
    """How much of a pixel lies within the picture: bilinear sampling beside it, where all is black."""
    return (place + 1).clamp(0, 1) * (size - place).clamp(0, 1)


class _Axis:
    """One side of the crops of pictures whose side is `length`, resized to `size`.

    first, last: [P, 1, 1], its outer pixels. shrinks: [P, 1, 1], pixels of the source for one of the result.
    num_samples: [P] float32, that make a pixel of the result. most_samples: of any crop.
    """

    def __init__(self, start: Tensor, extent: Tensor, length: int, size: int) -> None:
        self.length, self.size = length, size
        self.first, self.last, self.shrinks = _each(start), _each(start + extent - 1), _each(extent / size)
        # So many that they are a pixel of the source apart, at most: see offsets.
        self.num_samples = (2 * (extent / size).clamp(min=1).square() - 1).sqrt().ceil().float()
        self.most_samples = math.ceil(math.sqrt(2 * max(1.0, length / size)**2 - 1))

    def source(self, place: Tensor) -> Tensor:
        """The place in the source of one in the cropped picture."""
        return self.first + (place.clamp(0, self.size - 1) + 0.5) * self.shrinks - 0.5

    def offsets(self) -> Iterator[Tensor]:
        """[P, 1, 1] each, in pixels of the source. n samples d apart have the variance d^2 (n^2 - 1) / 12, and a
        bilinear sample 1 / 6."""
        num = self.num_samples[:, None, None]
        apart = (2 * (self.shrinks.square() - 1).clamp(min=0) / (num.square() - 1).clamp(min=1)).sqrt()
        for number in range(self.most_samples):
            yield (number - (num - 1) / 2) * apart

    def normal(self, place: Tensor) -> Tensor:
        """For grid_sample; nothing beyond the crop is seen."""
        return (place.clamp(self.first, self.last) * 2 + 1) / self.length - 1


def jittered(pictures: Tensor, draws: Draws) -> Tensor:
    """Brightness, contrast, saturation and hue of [P, 3, H, W] in 0..1, each clamped to 0..1."""
    brightness, contrast, saturation, hue = (
        _each(values)[:, None] for values in (draws.brightness, draws.contrast, draws.saturation, draws.hue))
    x = (pictures * brightness).clamp(0, 1)
    x = torch.lerp(_grey(x).mean((2, 3), keepdim=True), x, contrast).clamp(0, 1)
    x = torch.lerp(_grey(x), x, saturation).clamp(0, 1)
    return _turned(x, hue)


def _grey(x: Tensor) -> Tensor:
    red, green, blue = x.split(1, 1)
    grey: Tensor = red * GREY[0] + green * GREY[1] + blue * GREY[2]
    return grey


def _turned(x: Tensor, hue: Tensor) -> Tensor:
    """Each colour is the largest one, less a part of the spread that the hue, in sextants, says."""
    red, green, blue = x.split(1, 1)
    top = x.amax(1, keepdim=True)
    spread = top - x.amin(1, keepdim=True)
    over = 1 / torch.where(spread > 0, spread, 1.0)
    sextant = torch.where(red == top, (green - blue) * over, torch.where(
        green == top, (blue - red) * over + 2, (red - green) * over + 4)) + 6 * hue
    steps = (sextant + torch.arange(5, 0, -2, device=x.device)[:, None, None]) % 6
    return top - spread * torch.minimum(steps, 4 - steps).clamp(0, 1)
