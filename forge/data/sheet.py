"""A sheet of pictures of shards with their captions: as they are, and as a model would be shown them."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from forge.data.disk import cache_folder, replacing
from forge.data.fields import BadField, Picture
from forge.data.index import open_index
from forge.data.naming import ABSENT, Members, samples
from forge.data.storage import Location, opened
from forge.errors import ConfigError, UnusableEnvironment
from forge.notes import say

if TYPE_CHECKING:
    from PIL.Image import Image

SETTINGS: Mapping[str, Any] = {"samples": 12, "draws": 3, "size": 160, "seed": 0, "pictures": "jpg;jpeg;png;webp;gif",
                               "text": "txt;json;cls"}
_MOST = {"samples": 200, "draws": 20, "size": 1024}     # a sheet is looked at, and held in memory
_ACROSS = 6             # samples side by side
_FINER = 2              # times as large as they are shown, pictures are cropped from
_GAP = 6                # pixels
_LINES, _LINE, _SIGN = 3, 13, 6     # of a caption, and the pixels of a line and a sign
_FIELD_BYTES = 1 << 16  # of a caption, of which no more is shown


@dataclass(frozen=True)
class Seen:
    """picture: [S, S, 3] uint8, squashed. caption: "" where there is none."""

    picture: np.ndarray
    caption: str


def make_sheet(shards: Sequence[Location], out: Path, asked: Mapping[str, Any], changes: list[str]) -> int:
    """Writes a PNG of the first samples with pictures; how many there are on it.

    asked: see SETTINGS. changes: settings of augment=gpu. Raises ForgeError.
    """
    import torch

    for name, most in _MOST.items():
        if not 1 <= asked[name] <= most:
            raise ConfigError(f"{name}={asked[name]}: from 1 to {most} is wanted.")
    if out.suffix.lower() != ".png":
        raise ConfigError(f"{out}: the sheet is a PNG; name OUT.png.")
    augment = _augment(asked["size"], changes)
    found = list(islice(_pictures(shards, asked), asked["samples"]))
    if not found:
        raise ConfigError(f"No sample has a picture that can be read in a field pictures={asked['pictures']}: name the "
                          "field; `python -m forge.shards info` lists those that there are.")
    sources = torch.from_numpy(np.stack([seen.picture for seen in found]))
    rows = [np.stack([_squashed(seen.picture, asked["size"]) for seen in found])]
    for draw in range(asked["draws"]):
        seeds = torch.arange(len(found)) + asked["seed"] + (draw << 32)
        rows.append((augment.augmented(sources, seeds) * 255).round().byte().permute(0, 2, 3, 1).numpy())
    out.parent.mkdir(parents=True, exist_ok=True)
    with replacing(out) as file:
        _drawn(found, rows).save(file, "png")
    return len(found)


def _augment(size: int, changes: list[str]) -> Any:
    """augment=gpu, to be used without a model: its numbers stay between 0 and 1. Raises ConfigError."""
    from forge.augment import Augment
    from forge.composition import own_settings
    from forge.config import option_of

    fixed = ["augment=gpu", f"augment.size={size}", "augment.mean=[0,0,0]", "augment.std=[1,1,1]"]
    made = option_of("augment", Augment, own_settings("train", "augment", [*fixed, *changes], []))
    if problems := list(made.number_problems()):
        raise ConfigError("\n".join(problems))
    return made


def _pictures(shards: Sequence[Location], asked: Mapping[str, Any]) -> Iterator[Seen]:
    field = Picture(asked["pictures"], required=True, exif="apply", alpha="white", max_pixels=100_000_000)
    for path in shards:
        index = open_index(path, cache_folder(None))
        grouping = samples(index.names)
        members = Members.of(grouping)
        pictures, texts = (members.of_field(names)[0].tolist() for names in (field.names, asked["text"]))
        with opened(path) as file:
            for (key, _), member, text in zip(grouping.samples, pictures, texts, strict=True):
                if member == ABSENT:
                    continue
                try:
                    pixels = field.decode(file.read(int(index.sizes[member]), int(index.offsets[member])))
                except BadField as bad:
                    say(f"{path}, sample {key}: {bad}")
                    continue
                data = b"" if text == ABSENT else file.read(min(int(index.sizes[text]), _FIELD_BYTES),
                                                            int(index.offsets[text]))
                yield Seen(_squashed(pixels, _FINER * asked["size"]), _caption(data))


def _caption(data: bytes) -> str:
    """Of JSON with turns, what they say."""
    text = data.decode("utf-8", "replace")
    try:
        loaded = json.loads(text)
        return " / ".join(str(turn["content"]) for turn in loaded["messages"])
    except (ValueError, TypeError, KeyError, RecursionError):
        return text


def _squashed(pixels: np.ndarray, size: int) -> np.ndarray:
    image = _pillow("Image")
    return np.asarray(image.fromarray(pixels).resize((size, size), image.Resampling.BILINEAR), np.uint8)


def _drawn(found: Sequence[Seen], rows: Sequence[np.ndarray]) -> Image:
    """Bands of samples: a column each, the picture above, what is made of it below, then the caption."""
    size = rows[0].shape[1]
    cell, caption = size + _GAP, _LINES * _LINE + _GAP
    across, bands = min(_ACROSS, len(found)), -(-len(found) // _ACROSS)
    band = len(rows) * cell + caption + _GAP
    sheet: Image = _pillow("Image").new("RGB", (across * cell + _GAP, bands * band + _GAP), "white")
    pen = _pillow("ImageDraw").Draw(sheet)
    for number, seen in enumerate(found):
        left, top = _GAP + number % _ACROSS * cell, _GAP + number // _ACROSS * band
        for place, row in enumerate(rows):
            sheet.paste(_pillow("Image").fromarray(row[number]), (left, top + place * cell + (_GAP if place else 0)))
        words = textwrap.wrap(seen.caption, max(1, size // _SIGN), max_lines=_LINES, placeholder=" ...")
        for line, text in enumerate(words):
            pen.text((left, top + len(rows) * cell + _GAP + line * _LINE), text, fill="black")
    return sheet


def _pillow(name: str) -> Any:
    from importlib import import_module

    try:
        return import_module(f"PIL.{name}")
    except ImportError:
        raise UnusableEnvironment("A sheet needs the package pillow: pip install pillow.") from None
