"""Pictures as arrays: one policy for how they are turned, for alpha, 16 bits and CMYK, on every path."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import numpy as np

from forge.data.checksums import crc32
from forge.data.headers import ORIENTATION, BadPicture, Header, header_of
from forge.errors import UnusableEnvironment
from forge.notes import say

_END = b"\xff\xd9"                  # of a JPEG
# Behind a scan that is whole, libjpeg skips these bytes; in one that is not, it reads them as pixels.
_MORE_SCAN = bytes(0xA5 ^ number for number in range(64))
_MARK = re.compile(rb"\xff+[^\xff]", re.DOTALL)
_MARK_IN_SCAN = re.compile(rb"\xff+[^\x00\xd0-\xd7\xff]", re.DOTALL)       # 0: a stuffed byte; 0xd0-0xd7: restart marks
_BETWEEN_SCANS = {0xC4, 0xCC, 0xDA, 0xDB, 0xDC, 0xDD, 0xFE, *range(0xE0, 0xF0)}     # tables, scans, notes
_BACK = {2: 2, 3: 3, 4: 4, 5: 5, 6: 8, 7: 7, 8: 6}        # the orientation that undoes each
_SIXTEEN = ("I;16", "I;16L", "I;16B")
_BLANK = {"white": 255, "black": 0}
WHOLE = (1 << 31, 1 << 31)          # sides that no picture has: nothing less than all of it is enough


@dataclass(frozen=True)
class Policy:
    """How pictures become [height, width, 3] uint8.

    exif: turn a picture as its EXIF orientation says, or leave it as it is stored.
    alpha: what shows through where a picture is transparent; drop: the colours as stored, whatever their alpha.
    max_pixels: a picture that claims more is refused by its header, before anything is allocated.

    Of 16 bits the upper 8 are kept; CMYK becomes RGB, and grey three equal channels; of several frames the first is
    taken. Refused are damaged pictures and those of floating point, whose range nobody states.
    """

    exif: Literal["apply", "ignore"]
    alpha: Literal["white", "black", "drop"]
    max_pixels: int

    def refusals(self, width: Any, height: Any) -> Iterator[tuple[str, Any]]:
        """Why pictures of these sides are not decoded, and of which that is so. width, height: numbers, or arrays of
        int64 below 2^31. 0: it has no header."""
        yield "no picture header", (width < 1) | (height < 1)
        yield "too many pixels", width * height > self.max_pixels


def decode(data: bytes, policy: Policy, least: tuple[int, int] = WHOLE) -> np.ndarray:
    """[height, width, 3] uint8. Raises BadPicture.

    least: width and height, once the picture is turned, that are enough: a JPEG is halved up to three times as it is
    decoded (its frequencies are left out), as long as neither side falls below. The same on either path.

    The fast path answers only where it has no doubt; what it balks at goes the slow way. So which pictures are
    refused does not depend on the packages that are there.
    """
    header = header_of(data)
    for why, refused in policy.refusals(header.width, header.height):
        if refused:
            raise BadPicture(why, f"{header.width} x {header.height}")
    turn = header.orientation if policy.exif == "apply" else 1
    shrinking = _shrinking(header, least[::-1] if turn >= 5 else least)
    fast = _by_simplejpeg(data, header, shrinking) if header.kind == "jpeg" and header.components in (1, 3) else None
    pixels = _by_pillow(data, header, policy, shrinking) if fast is None else fast
    return np.ascontiguousarray(_turned(pixels, turn))


def upright(header: Header, policy: Policy) -> tuple[int, int]:
    """(width, height) of the whole picture as `decode` gives it out."""
    sideways = header.orientation >= 5 and policy.exif == "apply"
    return (header.height, header.width) if sideways else (header.width, header.height)


def _shrinking(header: Header, least: tuple[int, int]) -> int:
    """By how much a JPEG's sides are divided as it is decoded. least: (width, height) as stored."""
    enough = [by for by in (8, 4, 2) if -(-header.width // by) >= least[0] and -(-header.height // by) >= least[1]]
    return enough[0] if enough and header.kind == "jpeg" else 1


def _by_simplejpeg(data: bytes, header: Header, shrinking: int) -> np.ndarray | None:
    simplejpeg = _package("simplejpeg")
    if simplejpeg is None:
        say("JPEGs are decoded by Pillow, at half the speed of simplejpeg: pip install simplejpeg.")
        return None
    try:
        pixels: np.ndarray = simplejpeg.decode_jpeg(
            data, colorspace="RGB", strict=True, min_width=-(-header.width // shrinking),
            min_height=-(-header.height // shrinking), min_factor=1)
    except ValueError:          # libjpeg had a word to say
        return None
    return pixels


def _by_pillow(data: bytes, header: Header, policy: Policy, shrinking: int) -> np.ndarray:
    if header.kind == "jpeg":
        data = _whole_jpeg(data, header, policy)
    if header.kind == "png":
        _check_png(data)
    draft = (header.width // shrinking, header.height // shrinking) if shrinking > 1 else None
    with _pillow(data, header, policy, draft) as (image, turn_back):
        return _turned(_rgb(image, policy.alpha), turn_back)


def _check_png(data: bytes) -> None:
    """Raises BadPicture where a chunk that matters is not what its checksum says, at which Pillow does not look."""
    at = 8
    while at + 12 <= len(data):
        end = at + 8 + int.from_bytes(data[at:at + 4], "big")
        needed = not data[at + 4] & 0x20
        if needed and end + 4 <= len(data) and crc32(data[at + 4:end]) != int.from_bytes(data[end:end + 4], "big"):
            raise BadPicture("damaged picture", f"checksum of a chunk at byte {at}")
        at = end + 4


def _whole_jpeg(data: bytes, header: Header, policy: Policy) -> bytes:
    """The JPEG with an end mark. Raises BadPicture where a scan ends early, of which Pillow does not speak.

    Where only the end mark is missing, all pixels are there. Compared at an eighth of the size, which decodes faster.
    """
    body = data[:_end_of_scans(data)]
    with (_pillow(body + _END, header, policy, (1, 1)) as (image, _),
          _pillow(body + _MORE_SCAN + _END, header, policy, (1, 1)) as (other, _)):
        whole = image.tobytes() == other.tobytes()
    if not whole:
        raise BadPicture("damaged picture", "its scan ends early")
    return body + _END


def _end_of_scans(data: bytes) -> int:
    """Where the end mark is, or should be. Raises BadPicture where another mark stands in a scan."""
    at, in_scan = 2, False
    while (found := (_MARK_IN_SCAN if in_scan else _MARK).search(data, at)) is not None:
        marker, at = data[found.end() - 1], found.end()
        if marker == 0xD9:
            return found.start()
        if in_scan and marker not in _BETWEEN_SCANS:
            raise BadPicture("damaged picture", f"a mark 0x{marker:02x} in its scan")
        at += int.from_bytes(data[at:at + 2], "big")
        in_scan = marker == 0xDA
    return len(data)


@contextmanager
def _pillow(data: bytes, header: Header, policy: Policy,
            draft: tuple[int, int] | None) -> Iterator[tuple[Any, int]]:
    """A loaded image, and the orientation that brings it back to how it is stored. Raises BadPicture for whatever
    Pillow raises, and whatever was set in it elsewhere; and where the image is not of its header's sides: a second
    header, or a frame, may claim what the first was not allowed.

    draft: the sides that are enough, of a JPEG.
    """
    image_package = pillow()
    files = _package("PIL.ImageFile")
    before = files.LOAD_TRUNCATED_IMAGES, image_package.MAX_IMAGE_PIXELS
    # Of frames, Pillow learns the size as it loads them, and raises at twice this number
    files.LOAD_TRUNCATED_IMAGES, image_package.MAX_IMAGE_PIXELS = False, policy.max_pixels
    try:
        with image_package.open(io.BytesIO(data), formats=[header.kind]) as image:      # nothing but what it says
            _require_sides(image, header)
            if draft is not None:
                image.draft(None, draft)
            # Pillow turns TIFF, and no other, as it loads it; what else turns, turns back by itself.
            turned = image.getexif().get(ORIENTATION, 1) if header.kind == "tiff" else 1
            image.load()
            if draft is None:
                _require_sides(image, header)
            yield image, _BACK.get(turned, 1)
    except (BadPicture, UnusableEnvironment):
        raise
    except Exception as error:
        raise BadPicture("damaged picture", f"{type(error).__name__}: {error}") from None
    finally:
        files.LOAD_TRUNCATED_IMAGES, image_package.MAX_IMAGE_PIXELS = before


def _require_sides(image: Any, header: Header) -> None:
    if sorted(image.size) != sorted((header.width, header.height)):         # Pillow may have turned a TIFF
        raise BadPicture("damaged picture", f"{image.size[0]} x {image.size[1]}, and its header says "
                                            f"{header.width} x {header.height}")


def pillow() -> Any:
    """The module PIL.Image. Raises UnusableEnvironment."""
    image_package = _package("PIL.Image")
    if image_package is None:
        raise UnusableEnvironment("Decoding pictures needs the package pillow: pip install pillow.")
    return image_package


def _rgb(image: Any, alpha: str) -> np.ndarray:
    if image.mode in _SIXTEEN:
        wide = np.asarray(image).astype(np.uint16)
        return np.repeat((wide >> 8).astype(np.uint8)[:, :, None], 3, axis=2)
    if image.mode in ("I", "F"):
        raise BadPicture("picture of unknown range", f"mode {image.mode}")
    if image.mode in ("RGBA", "LA", "PA", "La", "RGBa") or "transparency" in image.info:
        layers = np.asarray(image.convert("RGBA"))
        return layers[:, :, :3] if alpha == "drop" else _blended(layers, _BLANK[alpha])
    return np.asarray(image.convert("RGB"))


def _blended(layers: np.ndarray, blank: int) -> np.ndarray:
    weight = layers[:, :, 3:].astype(np.uint32)
    mixed = layers[:, :, :3] * weight + blank * (255 - weight)
    return ((mixed + 127) // 255).astype(np.uint8)


def _turned(pixels: np.ndarray, orientation: int) -> np.ndarray:
    """Upright, for EXIF's orientation of the stored picture."""
    if orientation >= 5:
        pixels = pixels.transpose(1, 0, 2)
    if orientation in (2, 3, 6, 7):
        pixels = pixels[:, ::-1]
    return pixels[::-1] if orientation in (3, 4, 7, 8) else pixels


@cache
def _package(name: str) -> Any:
    """The module, or None where its package is not installed."""
    from importlib import import_module

    try:
        return import_module(name)
    except ImportError:
        return None
