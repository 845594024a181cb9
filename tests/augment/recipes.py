"""Recipes, and batches of pictures to try them on."""

import math
from dataclasses import replace

import torch

from forge.augment.cpu import InReader
from forge.augment.gpu import OnDevice
from forge.augment.recipe import Affine, Color, Crop, Flip
from forge.batch import Batch

PARTS = {"crop": Crop(1.0, [0.08, 1.0], [0.75, 1.333333]), "flip": Flip(0.5),
         "affine": Affine(0.5, 10.0, 0.1, [0.9, 1.1], 5.0), "color": Color(0.8, 0.4, 0.4, 0.4, 0.1)}


def recipe(size=16, path="fused", kind=OnDevice, **parts):
    """That of conf/augment/gpu.yaml, but for the parts that are given."""
    return kind(path, size, [0.5, 0.4, 0.3], [0.5, 0.6, 0.7], **{**PARTS, **parts})


def only(*names, **options):
    """A recipe of these parts, which always happen; the others never do."""
    parts = {name: replace(part, p=1.0 if name in names else 0.0) for name, part in PARTS.items()}
    return recipe(**{**parts, **options})


def noise(num, side):
    return torch.randint(0, 256, (num, side, side, 3), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)


def waves(num, side, most):
    """Pictures without edges: sums of two waves, of at most so many radians over the side and along each axis; and a
    bound of their second derivatives along any direction, in 0..1 over side squared."""
    generator = torch.Generator().manual_seed(1)
    place = (torch.arange(side) + 0.5) / side
    y, x = torch.meshgrid(place, place, indexing="ij")
    total = torch.full((num, 3, side, side), 0.5)
    for _ in range(2):
        along, across, phase = torch.rand(3, num, 3, 1, 1, generator=generator)
        total += 0.22 * torch.sin(most * (along * x + across * y) + 2 * math.pi * phase)
    return (total * 255).round().byte().permute(0, 2, 3, 1).contiguous(), 2 * 0.22 * 2 * most**2


def batch(pictures, seeds=None):
    seeds = torch.arange(len(pictures)) * 7919 + 1 if seeds is None else seeds
    return Batch({"tokens": torch.zeros(1, 4, dtype=torch.int64), "pictures": pictures, "picture_seeds": seeds}, 0, 0)


def seen(option, pictures, seeds=None):
    """What the model would be given."""
    return option(option.read(batch(pictures, seeds))).tensors["pictures"]


KINDS = {"gpu": OnDevice, "cpu": InReader}
