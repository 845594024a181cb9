"""Scenes as pictures. Needs Pillow."""

from __future__ import annotations

import io
from random import Random
from typing import TYPE_CHECKING

from forge.data.scenes import SIDE, Scene, Thing
from forge.errors import UnusableEnvironment

if TYPE_CHECKING:
    from PIL import Image, ImageDraw

_FINER = 4              # drawn so many times larger and shrunk, for smooth edges
_RADIUS = {"small": 0.22, "large": 0.42}        # of a cell's side: nearly twice, so that no size is in doubt
_FREE = 0.06            # of a cell's side: how far a thing stands from its cell's middle, at most
_RGB = {"red": (220, 40, 40), "green": (40, 165, 60), "blue": (45, 80, 220), "yellow": (240, 205, 30),
        "purple": (150, 50, 180)}
_SPREAD = 18            # of each channel of a colour
_GROUNDS = ((15, 60), (195, 240))               # shades of grey behind the things: none near the colours' own
_QUALITY = 92

Point = tuple[float, float]


def rendered(scene: Scene, size: int, draw: Random) -> Image.Image:
    """The scene in a square of `size` pixels. `draw` says all that no question is about: places inside the cells,
    shades, the ground. Raises UnusableEnvironment."""
    try:
        from PIL import Image, ImageDraw
    except ImportError:
        raise UnusableEnvironment("Drawing pictures needs the package pillow: pip install pillow.") from None
    ground = draw.randint(*draw.choice(_GROUNDS))
    large = Image.new("RGB", (size * _FINER, size * _FINER), (ground, ground, ground))
    pen = ImageDraw.Draw(large)
    for thing in scene.things:
        _add(pen, thing, size * _FINER / SIDE, draw)
    return large.resize((size, size), Image.Resampling.BOX)


def encoded(picture: Image.Image, kind: str) -> bytes:
    """kind: "jpg" or "png"."""
    file = io.BytesIO()
    if kind == "jpg":
        picture.save(file, "JPEG", quality=_QUALITY, subsampling=0)     # small things would lose their colour
    else:
        picture.save(file, "PNG")
    return file.getvalue()


def _add(pen: ImageDraw.ImageDraw, thing: Thing, cell: float, draw: Random) -> None:
    x, y = ((place + 0.5 + draw.uniform(-_FREE, _FREE)) * cell for place in thing.place)
    radius = _RADIUS[thing.size] * cell
    colour = tuple(min(255, max(0, channel + draw.randint(-_SPREAD, _SPREAD))) for channel in _RGB[thing.colour])
    if thing.shape == "circle":
        pen.ellipse((x - radius, y - radius, x + radius, y + radius), fill=colour)
    else:
        pen.polygon([(x + right * radius, y + down * radius) for right, down in _CORNERS[thing.shape]], fill=colour)


_CORNERS: dict[str, list[Point]] = {
    "square": [(-0.9, -0.9), (0.9, -0.9), (0.9, 0.9), (-0.9, 0.9)],
    "triangle": [(0, -1), (1, 0.9), (-1, 0.9)],
    "cross": [(-0.3, -1), (0.3, -1), (0.3, -0.3), (1, -0.3), (1, 0.3), (0.3, 0.3), (0.3, 1), (-0.3, 1), (-0.3, 0.3),
              (-1, 0.3), (-1, -0.3), (-0.3, -0.3)],
}
