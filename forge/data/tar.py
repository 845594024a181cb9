"""A strict walk over a tar file: every member with its place, and every byte that does not add up.

The tarfile module ends quietly at a bad header, at a second archive, or where a file was cut inside a header, and the
rest of the samples are lost without a word. This walk names the byte.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace

BLOCK = 512
_LARGEST_EXTENSION = 1 << 20    # bytes of a long name or of PAX records; a longer one is a damaged header
_REGULAR = b"0\0" + b"7"        # member types that hold a file
_EXTENSIONS = b"xgLK"           # what they hold belongs to the next member
_OTHER = b"123456"              # links, devices, folders, pipes: known, and never data


@dataclass(frozen=True)
class Member:
    """A regular file: `size` bytes of data at byte `offset` of the tar."""

    name: str
    offset: int
    size: int


@dataclass(frozen=True)
class Fault:
    """What is wrong at byte `offset`. harmless: every member before it is whole and nothing seems lost."""

    offset: int
    reason: str
    harmless: bool = False


@dataclass(frozen=True)
class _Header:
    name: str
    kind: int
    size: int


class _Bad(ValueError):
    """A block that is not a header, and why."""


def walk(descriptor: int) -> Iterator[Member | Fault]:
    """The members of an open tar file in order, and its faults. After a bad header, goes on at the next good one.

    Nothing is read or allocated on a header's word: a member that would end beyond the file is a fault.
    """
    end = os.fstat(descriptor).st_size
    at: int | None = 0
    extension: dict[str, str] = {}
    while at is not None and at + BLOCK <= end:
        block = os.pread(descriptor, BLOCK, at)
        if not block.strip(b"\0"):
            yield from _after_end(descriptor, at, end)
            return
        try:
            header = _apply(_parse(block), extension)
        except _Bad as bad:
            yield Fault(at, _not_a_tar(block) if at == 0 else str(bad))
            at, extension = _next_header(descriptor, at + BLOCK, end), {}
            continue
        data = at + BLOCK
        if data + header.size > end:
            yield Fault(at, f"member {header.name!r} claims {header.size} bytes of data, and the file ends "
                            f"after {end - data}")
            return
        if header.kind in _REGULAR:
            yield Member(header.name, data, header.size)
        extension = _extended(descriptor, header, data, extension) if header.kind in _EXTENSIONS else {}
        at = data + -(-header.size // BLOCK) * BLOCK
    if at is not None:
        yield _cut(at, end)


def _cut(at: int, end: int) -> Fault:
    """What the lack of an end says: where a header should start at byte `at`, the file ends."""
    if end == 0:
        return Fault(0, "the file is empty (0 bytes)")
    if at < end:
        return Fault(at, f"the file ends inside a header ({end - at} of {BLOCK} bytes)")
    if at > end:
        return Fault(end, "the file ends inside the padding behind a member")
    return Fault(end, "the blocks that end an archive are missing: the file may have been cut here", harmless=True)


def _parse(block: bytes) -> _Header:
    """Raises _Bad."""
    stored = _number(block[148:156])
    if stored != sum(block) - sum(block[148:156]) + 8 * ord(" "):
        raise _Bad("bad header: its checksum does not match")
    kind = block[156]
    if kind not in _REGULAR + _OTHER + _EXTENSIONS:
        raise _Bad(f"bad header: members of type {chr(kind)!r} are not supported")
    name = block[:100].split(b"\0", 1)[0]
    prefix = block[345:500].split(b"\0", 1)[0]
    if prefix and block[257:263] == b"ustar\0":     # GNU tar keeps other things there
        name = prefix + b"/" + name
    size = _number(block[124:136]) if kind in _REGULAR + _EXTENSIONS else 0
    return _Header(name.decode("utf-8", "surrogateescape"), kind, size)


def _number(field: bytes) -> int:
    if field[0] in (0x80, 0xFF):                    # GNU's base 256, for what octal digits cannot hold
        value = int.from_bytes(field[1:], "big")
        if field[0] == 0xFF:
            raise _Bad("bad header: a number is negative")
        return value
    try:
        return int(field.split(b"\0", 1)[0].strip() or b"0", 8)
    except ValueError:
        raise _Bad(f"bad header: {field!r} is not an octal number") from None


def _apply(header: _Header, extension: dict[str, str]) -> _Header:
    if header.kind in _EXTENSIONS:
        if header.size > _LARGEST_EXTENSION:
            raise _Bad(f"bad header: {header.size} bytes of extended header")
        return header
    if any(key.startswith("GNU.sparse.") for key in extension):
        raise _Bad("bad header: sparse members are not supported")
    size = extension.get("size")
    if size is not None and not (size.isascii() and size.isdigit()):
        raise _Bad(f"bad header: {size!r} is not a size")
    return replace(header, name=extension.get("path", header.name), size=header.size if size is None else int(size))


def _extended(descriptor: int, header: _Header, at: int, extension: dict[str, str]) -> dict[str, str]:
    """What the next member's header says in full: a long name, or PAX records."""
    data = os.pread(descriptor, header.size, at)
    if header.kind == ord("L"):
        return extension | {"path": data.split(b"\0", 1)[0].decode("utf-8", "surrogateescape")}
    if header.kind == ord("x"):
        return extension | _pax_records(data)
    return extension


def _pax_records(data: bytes) -> dict[str, str]:
    """Records "LENGTH KEY=VALUE newline", the length counting all of it."""
    records = {}
    while data:
        length, _, rest = data.partition(b" ")
        if not length.isdigit() or not len(length) < int(length) <= len(data):
            break
        key, _, value = rest[:int(length) - len(length) - 2].partition(b"=")
        records[key.decode("utf-8", "surrogateescape")] = value.decode("utf-8", "surrogateescape")
        data = data[int(length):]
    return records


def _not_a_tar(block: bytes) -> str:
    if block[:2] == b"\x1f\x8b":
        return "this is gzip data, into which there is no random access: unpack it with gunzip first"
    return f"not a tar file, it begins with {block[:24]!r}"


def _next_header(descriptor: int, at: int, end: int) -> int | None:
    for place in range(at, end - BLOCK + 1, BLOCK):
        block = os.pread(descriptor, BLOCK, place)
        if block[257:262] != b"ustar":
            continue
        try:
            _parse(block)
        except _Bad:
            continue
        return place
    return None


def _after_end(descriptor: int, at: int, end: int) -> Iterator[Fault]:
    """Behind the zero blocks nothing should follow; a second archive there would never be read."""
    place = at
    while place < end:
        chunk = os.pread(descriptor, 1 << 20, place)
        used = len(chunk) - len(chunk.lstrip(b"\0"))
        if used < len(chunk):
            first = place + used // BLOCK * BLOCK
            if _next_header(descriptor, first, min(first + BLOCK, end)) is not None:
                yield Fault(first, "a second archive follows the end of the first, and its members are not read: "
                                   "unpack both and make one")
            else:
                yield Fault(first, f"{end - first} bytes follow the end of the archive", harmless=True)
            return
        place += max(len(chunk), 1)
