"""What is drawn for each picture: a function of its seed, whatever batch, rank, worker or device it is in."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from forge.data.hashing import LAST_SHIFT, ROUNDS, STEP

if TYPE_CHECKING:
    from forge.augment.recipe import Crop, Recipe

TRIES = 10              # candidates for a crop, as in torchvision; if none fits, the largest of a fitting ratio


@dataclass(frozen=True)
class Draws:
    """Each [P] float64: neutral where it was drawn that a change does not happen.

    left, top, width, height: of the crop, whole pixels of the source. flip: bool.
    angle, shear: degrees. scale. right, down: translation, in pixels of the result.
    brightness, contrast, saturation: factors. hue: turns.
    """

    left: Tensor
    top: Tensor
    width: Tensor
    height: Tensor
    flip: Tensor
    angle: Tensor
    right: Tensor
    down: Tensor
    scale: Tensor
    shear: Tensor
    brightness: Tensor
    contrast: Tensor
    saturation: Tensor
    hue: Tensor


def drawn(recipe: Recipe, seeds: Tensor, height: int, width: int) -> Draws:
    """For pictures of these sides. In float64 throughout, so that no device rounds a crop to another pixel."""
    numbers = uniform(seeds, 2 * TRIES + 15)
    tries, (where, across, along, flip, warp, angle, right, down, scale, shear, tint, *color) = \
        numbers[:, :2 * TRIES], numbers[:, 2 * TRIES:].unbind(1)
    box = _crop(recipe.crop, tries, where < recipe.crop.p, height, width)
    affine, warped = recipe.affine, warp < recipe.affine.p
    reach = affine.translate * recipe.size
    strengths, tinted = recipe.color, tint < recipe.color.p
    brightness, contrast, saturation = (
        _between(number, max(0.0, 1 - most), 1 + most).where(tinted, 1.0) for number, most in
        zip(color, (strengths.brightness, strengths.contrast, strengths.saturation), strict=False))
    return Draws(
        left=(across * (width - box[0] + 1)).floor(), top=(along * (height - box[1] + 1)).floor(),
        width=box[0], height=box[1], flip=flip < recipe.flip.p,
        angle=_between(angle, -affine.degrees, affine.degrees).where(warped, 0.0),
        right=_between(right, -reach, reach).where(warped, 0.0), down=_between(down, -reach, reach).where(warped, 0.0),
        scale=_between(scale, *affine.scale).where(warped, 1.0),
        shear=_between(shear, -affine.shear, affine.shear).where(warped, 0.0),
        brightness=brightness, contrast=contrast, saturation=saturation,
        hue=_between(color[3], -strengths.hue, strengths.hue).where(tinted, 0.0))


def uniform(seeds: Tensor, num: int) -> Tensor:
    """[P, num] float64 in [0, 1): number i of a seed is the hash of (seed, i), the same bits on every device."""
    # All of splitmix64, its factors as the signed numbers that torch computes with.
    mixed = seeds[:, None] + torch.arange(1, num + 1, device=seeds.device) * (STEP - 2**64)
    for shift, factor in ROUNDS:
        mixed = (mixed ^ _shifted(mixed, shift)) * (factor - 2**64)
    numbers: Tensor = _shifted(mixed ^ _shifted(mixed, LAST_SHIFT), 11).double() * 2.0**-53
    return numbers


def _shifted(number: Tensor, places: int) -> Tensor:
    """To the right, with zeros: torch shifts signed numbers, and with their sign."""
    return (number >> places) & ((1 << 64 - places) - 1)


def _between(number: Tensor, low: float, high: float) -> Tensor:
    return number * (high - low) + low


def _crop(crop: Crop, tries: Tensor, happens: Tensor, height: int, width: int) -> tuple[Tensor, Tensor]:
    """Width and height, [P] each: the first of the candidates that lies within the picture."""
    area = _between(tries[:, :TRIES], *crop.scale) * (height * width)
    ratio = _between(tries[:, TRIES:], *map(math.log, crop.ratio)).exp()
    across, down = (area * ratio).sqrt().round(), (area / ratio).sqrt().round()
    fits = (across >= 1) & (across <= width) & (down >= 1) & (down <= height)
    first = fits & (fits.cumsum(1) == 1)
    most = max(1, min(width, round(height * crop.ratio[1]))), max(1, min(height, round(width / crop.ratio[0])))
    there = fits.any(1)

    def chosen(side: Tensor, fallback: float, whole: float) -> Tensor:
        return (side * first).sum(1).where(there, fallback).where(happens, whole)

    return chosen(across, float(most[0]), float(width)), chosen(down, float(most[1]), float(height))
