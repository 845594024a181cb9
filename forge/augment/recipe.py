"""What is done to pictures, and how strongly: the settings that the options of this group share."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from torch import Tensor

    from forge.config import Config

Path = Literal["fused", "kornia"]


@dataclass(frozen=True)
class Crop:
    """A part of the picture, drawn as in torchvision's RandomResizedCrop (Szegedy et al. 2015), resized with antialias.

    p: how probable; else the whole picture is resized. scale: from and to, the part's share of the picture's area.
    ratio: from and to, width over height, drawn evenly in its logarithm.
    """

    p: float
    scale: list[float]
    ratio: list[float]


@dataclass(frozen=True)
class Flip:
    """p: how probable it is that left and right change places."""

    p: float


@dataclass(frozen=True)
class Affine:
    """Of the cropped picture, about its centre; black where nothing of it comes to lie.

    p: how probable. degrees: of rotation, at most, either way. translate: at most, either way, as a share of the side.
    scale: from and to. shear: degrees at most, either way, along x.
    """

    p: float
    degrees: float
    translate: float
    scale: list[float]
    shear: float


@dataclass(frozen=True)
class Color:
    """torchvision's ColorJitter in a fixed order: brightness, contrast, saturation, hue.

    p: how probable. brightness, contrast, saturation: factors are drawn from 1 - b (at least 0) to 1 + b. hue: turns of
    the colour wheel, at most, either way; up to 0.5.
    """

    p: float
    brightness: float
    contrast: float
    saturation: float
    hue: float


@dataclass(frozen=True)
class Recipe:
    """size: sides of what the model sees. mean, std: of each colour in 0..1, subtracted and divided by.

    path: fused: one sampling of the source for all geometry, forge's own. kornia: operation after operation.
    """

    path: Path
    size: int
    mean: list[float]
    std: list[float]
    crop: Crop
    flip: Flip
    affine: Affine
    color: Color

    def augmented(self, pictures: Tensor, seeds: Tensor) -> Tensor:
        """[P, 3, size, size] float32 in 0..1, of pictures [P, H, W, 3] uint8 and seeds [P] int64."""
        from forge.augment.by_kornia import by_kornia
        from forge.augment.draws import drawn
        from forge.augment.fused import fused

        draws = drawn(self, seeds, pictures.shape[1], pictures.shape[2])
        return {"fused": fused, "kornia": by_kornia}[self.path](pictures, draws, self.size)

    def problems(self, config: Config) -> Iterator[str]:
        chosen = f"augment={config.choices.get('augment', '')}"
        vision = getattr(config.model, "vision", None)
        if vision is None:
            yield (f"{chosen} changes pictures, and model={config.choices.get('model', '')} takes none: choose a model "
                   "that does (model=vlm_*), or augment=none.")
        for name, seen in (("size", "image_size"), ("mean", "mean"), ("std", "std")) if vision is not None else ():
            if getattr(self, name) != getattr(vision, seen):
                yield (f"augment.{name}={getattr(self, name)} is not model.vision.{seen}={getattr(vision, seen)}, with "
                       f"which the model is evaluated: leave augment.{name} as it is, or set both.")
        if self.path == "kornia" and find_spec("kornia") is None:
            yield "augment.path=kornia needs the package kornia: pip install 'forge-switchboard[kornia]'."
        yield from self.number_problems()

    def number_problems(self) -> Iterator[str]:
        """What is wrong whatever the model is."""
        if self.size < 1:
            yield f"augment.size={self.size}: at least 1 is wanted."
        if len(self.mean) != 3:
            yield f"augment.mean={self.mean}: three numbers are wanted, one a colour."
        if len(self.std) != 3 or min(self.std) <= 0:
            yield f"augment.std={self.std}: three numbers above 0 are wanted, one a colour."
        crop, affine, color = self.crop, self.affine, self.color
        for name, values, most in (("crop.scale", crop.scale, 1.0), ("crop.ratio", crop.ratio, math.inf),
                                   ("affine.scale", affine.scale, math.inf)):
            if len(values) != 2 or not 0 < values[0] <= values[1] <= most:
                yield (f"augment.{name}={values}: [from, to] is wanted, above 0"
                       f"{' and at most 1' if most == 1 else ''}, the smaller first.")
        for name, value, most in (
                ("crop.p", crop.p, 1.0), ("flip.p", self.flip.p, 1.0), ("affine.p", affine.p, 1.0),
                ("color.p", color.p, 1.0), ("affine.degrees", affine.degrees, 180.0),
                ("affine.translate", affine.translate, 1.0), ("affine.shear", affine.shear, 89.0),
                ("color.brightness", color.brightness, math.inf), ("color.contrast", color.contrast, math.inf),
                ("color.saturation", color.saturation, math.inf), ("color.hue", color.hue, 0.5)):
            if not 0 <= value <= most:
                yield f"augment.{name}={value}: {f'from 0 to {most:g}' if most < math.inf else '0 or more'} is wanted."
