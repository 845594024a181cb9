"""What a picture says of itself before anything is decoded: kind, sides, and how it is to be turned.

Decoders allocate by the header's word: a kilobyte that claims 65,500 x 65,500 pixels asks for 12 GB. Here a few hundred
bytes are read, by position, so that the picture of a large file need not be read either.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass

Read = Callable[[int, int], bytes]      # (offset, size) -> at most so many bytes

_SIDES_IN = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}      # JPEG segments that begin a frame
_ALONE = frozenset(range(0xD0, 0xD9)) | {0x01}                     # JPEG markers without a length
ORIENTATION, _WIDTH, _HEIGHT = 0x0112, 0x0100, 0x0101             # TIFF tags
_MOST_SEGMENTS = 4096       # of a header; a file that has more is no picture
_MOST_EXIF = 1 << 20        # bytes that are looked at for an orientation


class BadPicture(Exception):
    """Why there is no picture to be had. `reason` is short and of few kinds, so that it can be counted."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason} ({detail})" if detail else reason)
        self.reason = reason

    def __reduce__(self) -> tuple[type[BadPicture], tuple[str]]:
        return BadPicture, (str(self),)


@dataclass(frozen=True)
class Header:
    """kind: "jpeg", "png", "webp", "gif", "bmp" or "tiff". width, height: as stored, before the picture is turned.

    orientation: EXIF's 1 to 8; 1: as stored. components: of a JPEG, 0 of others.
    """

    kind: str
    width: int
    height: int
    orientation: int = 1
    components: int = 0


def header_of(data: bytes) -> Header:
    """Raises BadPicture."""
    return read_header(lambda at, size: data[at:at + size])


def read_header(read: Read) -> Header:
    """Raises BadPicture: where the data are no picture, or one without sides."""
    start = read(0, 32)
    if not start:
        raise BadPicture("empty picture")
    for first, parse in _KINDS.items():
        if start.startswith(first):
            try:
                header = parse(read)
            except (struct.error, IndexError, ValueError):
                raise BadPicture("broken picture header", f"it begins with {start[:12]!r}") from None
            if header.width < 1 or header.height < 1:
                raise BadPicture("picture without sides", f"{header.width} x {header.height}")
            return header
    raise BadPicture("not a picture", f"it begins with {start[:12]!r}")


def _jpeg(read: Read) -> Header:
    frame: tuple[int, int, int] | None = None
    orientation = 0
    for marker, at, size in _segments(read):
        if marker in _SIDES_IN:
            height, width, components = struct.unpack(">HHB", read(at + 1, 5))
            frame = frame or (width, height, components)
        elif marker == 0xE1 and not orientation and read(at, 6) == b"Exif\0\0":
            orientation = _orientation(read(at + 6, min(size - 6, _MOST_EXIF)))
    if frame is None:
        raise BadPicture("broken picture header", "no frame in a JPEG")
    return Header("jpeg", frame[0], frame[1], orientation or 1, frame[2])


def _segments(read: Read) -> Iterator[tuple[int, int, int]]:
    """(marker, offset of its data, bytes of data) up to the first scan."""
    at = 2
    for _ in range(_MOST_SEGMENTS):
        fill, marker = read(at, 2)
        if fill != 0xFF:
            raise BadPicture("broken picture header", f"no marker at byte {at} of a JPEG")
        if marker == 0xFF:
            at += 1
        elif marker in _ALONE:
            at += 2
        elif marker in (0xDA, 0xD9):
            return
        else:
            (length,) = struct.unpack(">H", read(at + 2, 2))
            if length < 2:
                raise BadPicture("broken picture header", f"a segment of {length} bytes in a JPEG")
            yield marker, at + 4, length - 2
            at += 2 + length
    raise BadPicture("broken picture header", "a JPEG without a scan")


def _png(read: Read) -> Header:
    width, height = struct.unpack(">II", read(16, 8))
    if read(12, 4) != b"IHDR":
        raise BadPicture("broken picture header", "a PNG without IHDR")
    return Header("png", width, height, _in_chunks(read, 8, ">", b"eXIf"))


def _webp(read: Read) -> Header:
    if read(8, 4) != b"WEBP":
        raise BadPicture("not a picture", "RIFF data of another kind")
    kind, data = read(12, 4), read(20, 10)
    if kind == b"VP8X":
        width, height = (1 + int.from_bytes(data[at:at + 3], "little") for at in (4, 7))
        return Header("webp", width, height, _in_chunks(read, 12, "<", b"EXIF"))
    if kind == b"VP8L":
        (bits,) = struct.unpack("<I", data[1:5])
        return Header("webp", 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF))
    width, height = struct.unpack("<HH", data[6:10])
    return Header("webp", width & 0x3FFF, height & 0x3FFF)


def _in_chunks(read: Read, at: int, order: str, wanted: bytes) -> int:
    """The orientation in an EXIF chunk of a PNG (big-endian) or WebP (little-endian, name before size)."""
    with suppress(struct.error):
        for _ in range(_MOST_SEGMENTS):
            first, second = struct.unpack(f"{order}4s4s", read(at, 8))
            name, size = (second, first) if order == ">" else (first, second)
            length = int.from_bytes(size, "big" if order == ">" else "little")
            if name == wanted:
                return _orientation(read(at + 8, min(length, _MOST_EXIF)).removeprefix(b"Exif\0\0"))
            at += 12 + length if order == ">" else 8 + length + length % 2
    return 1


def _gif(read: Read) -> Header:
    return Header("gif", *struct.unpack("<HH", read(6, 4)))


def _bmp(read: Read) -> Header:
    if int.from_bytes(read(14, 4), "little") == 12:        # the first kind of BMP
        return Header("bmp", *struct.unpack("<HH", read(18, 4)))
    width, height = struct.unpack("<ii", read(18, 8))
    return Header("bmp", width, abs(height))                # negative: the first row is the top one


def _tiff(read: Read) -> Header:
    tags = _tags(read)
    return Header("tiff", tags.get(_WIDTH, 0), tags.get(_HEIGHT, 0), _valid(tags.get(ORIENTATION, 1)))


def _orientation(exif: bytes) -> int:
    """1 where the data are garbage: a camera's mistake is no reason to lose a picture."""
    with suppress(struct.error, BadPicture):
        return _valid(_tags(lambda at, size: exif[at:at + size]).get(ORIENTATION, 1))
    return 1


def _valid(orientation: int) -> int:
    return orientation if 1 <= orientation <= 8 else 1


def _tags(read: Read) -> dict[int, int]:
    """The whole numbers of the first directory of TIFF data, which EXIF is as well. Raises struct.error, BadPicture."""
    order = {b"II*\0": "<", b"MM\0*": ">"}.get(read(0, 4))
    if order is None:
        raise BadPicture("broken picture header", "TIFF data of another kind")
    (at,) = struct.unpack(f"{order}I", read(4, 4))
    (count,) = struct.unpack(f"{order}H", read(at, 2))
    found = {}
    for entry in range(at + 2, at + 2 + 12 * min(count, _MOST_SEGMENTS), 12):
        tag, kind, number, value = struct.unpack(f"{order}HHI4s", read(entry, 12))
        if number == 1 and kind in (3, 4):
            found[tag] = struct.unpack(f"{order}{'H' if kind == 3 else 'I'}", value[:2 if kind == 3 else 4])[0]
    return found


_KINDS: dict[bytes, Callable[[Read], Header]] = {
    b"\xff\xd8\xff": _jpeg, b"\x89PNG\r\n\x1a\n": _png, b"RIFF": _webp, b"GIF87a": _gif, b"GIF89a": _gif, b"BM": _bmp,
    b"II*\0": _tiff, b"MM\0*": _tiff}
