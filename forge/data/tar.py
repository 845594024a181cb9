"""A strict walk over a tar file: every member with its place, and every byte that does not add up.

The tarfile module ends quietly at a bad header, at a second archive, or where a file was cut inside a header, and the
rest of the samples are lost without a word. This walk names the byte, and goes on.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import dataclass, replace

from forge.data.storage import File

BLOCK = 512
_LARGEST_EXTENSION = 1 << 20    # bytes of a long name or of PAX records; a longer one is a damaged header
_LOOKED_THROUGH = 1 << 20       # bytes read at a time where a header is looked for: a whole number of blocks
_REGULAR = b"0\0" + b"7"        # member types that hold a file
_EXTENSIONS = b"xgLK"           # what they hold belongs to the next member
_OTHER = {ord("1"): "a hard link", ord("2"): "a symbolic link", ord("3"): "a device", ord("4"): "a device",
          ord("5"): "a folder", ord("6"): "a pipe"}     # known, and never data
_FOLDER = ord("5")


@dataclass(frozen=True)
class Member:
    """A regular file: `size` bytes of data at byte `offset` of the tar."""

    name: str
    offset: int
    size: int


@dataclass(frozen=True)
class Fault:
    """What is wrong at byte `offset`. harmless: the members are whole and nothing seems lost."""

    offset: int
    reason: str
    harmless: bool = False


@dataclass(frozen=True)
class _Header:
    name: str
    kind: int
    size: int


class _Bad(ValueError):
    """A block that is not a header, and why.

    foreign: it may belong to a file that is no tar. skip: bytes to what follows, where that is known.
    """

    def __init__(self, why: str, foreign: bool = False, skip: int | None = None) -> None:
        super().__init__(why)
        self.foreign, self.skip = foreign, skip


def walk(file: File) -> Iterator[Member | Fault]:
    """The members of a tar file in order, and its faults. After a bad header, goes on at the next good one; after the
    end of the archive, with a second one that was glued to it.

    Nothing is read or allocated on a header's word: a member that would end beyond the file is a fault.
    """
    end = file.size
    at: int | None = 0
    extension: dict[str, str] = {}
    while at is not None and at + BLOCK <= end:
        block = file.read(BLOCK, at)
        if not block.strip(b"\0"):
            at = yield from _after_end(file, at, end)
            continue
        try:
            header = _apply(_parse(block), extension)
            data = at + BLOCK
            if data + header.size > end:
                raise _Bad(f"member {header.name!r} claims {header.size} bytes of data, and the file ends after "
                           f"{end - data}")
            extension = _extended(file, header, data, extension) if header.kind in _EXTENSIONS else {}
        except _Bad as bad:
            yield Fault(at, _not_a_tar(block) if at == 0 and bad.foreign else str(bad))
            at, extension = (_next_header(file, at + BLOCK, end) if bad.skip is None else at + bad.skip), {}
            if at is None:
                return
            continue
        if header.kind in _REGULAR:
            yield Member(header.name, data, header.size)
        elif header.kind in _OTHER and header.kind != _FOLDER:
            yield Fault(at, f"{header.name!r} is {_OTHER[header.kind]}, which is not followed", harmless=True)
        at = data + _padded(header.size)
    if at is not None:
        yield from _cut(at, end)


def _padded(size: int) -> int:
    return -(-size // BLOCK) * BLOCK


def _cut(at: int, end: int) -> Iterator[Fault]:
    """What the lack of an end says: where a header should start at byte `at`, the file ends."""
    if end == 0:
        yield Fault(0, "the file is empty (0 bytes)")
    elif at < end:
        yield Fault(at, f"the file ends inside a header ({end - at} of {BLOCK} bytes)")
    elif at > end:
        yield Fault(end, "the file ends inside the padding behind a member")
    else:
        yield Fault(end, "the blocks that end an archive are missing: the file may have been cut here", harmless=True)


def _parse(block: bytes) -> _Header:
    """Raises _Bad."""
    stored = _number(block[148:156])
    if stored != sum(block) - sum(block[148:156]) + 8 * ord(" "):
        raise _Bad("bad header: its checksum does not match", foreign=True)
    kind = block[156]
    if kind not in _REGULAR + _EXTENSIONS and kind not in _OTHER:
        if kind == ord("S"):        # its map may go on in further blocks, so that what follows must be looked for
            raise _Bad("bad header: sparse members are not supported")
        raise _Bad(f"bad header: members of type {chr(kind)!r} are not supported",
                   skip=BLOCK + _padded(_number(block[124:136])))
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
        raise _Bad(f"bad header: {field!r} is not an octal number", foreign=True) from None


def _apply(header: _Header, extension: dict[str, str]) -> _Header:
    if header.kind in _EXTENSIONS:
        if header.size > _LARGEST_EXTENSION:
            raise _Bad(f"bad header: {header.size} bytes of extended header")
        return header
    size = extension.get("size")
    if size is not None and not (size.isascii() and size.isdigit()):
        raise _Bad(f"bad header: {size!r} is not a size")
    name = extension.get("path", header.name)
    stored = header.size if size is None or header.kind not in _REGULAR else int(size)
    if any(key.startswith("GNU.sparse.") for key in extension):
        raise _Bad(f"bad header: {name!r} is a sparse member, which is not supported", skip=BLOCK + _padded(stored))
    if "\0" in name:
        raise _Bad(f"bad header: the name {name!r} holds a zero byte", skip=BLOCK + _padded(stored))
    return replace(header, name=name, size=stored)


def _extended(file: File, header: _Header, at: int, extension: dict[str, str]) -> dict[str, str]:
    """What the next member's header says in full: a long name, or PAX records. Raises _Bad."""
    data = file.read(header.size, at)
    if header.kind == ord("L"):
        return extension | {"path": data.split(b"\0", 1)[0].decode("utf-8", "surrogateescape")}
    if header.kind == ord("x"):
        return extension | _pax_records(data)
    return extension


def _pax_records(data: bytes) -> dict[str, str]:
    """Records "LENGTH KEY=VALUE newline", the length counting all of it. Raises _Bad."""
    records = {}
    while data := data.lstrip(b"\0"):
        length, _, rest = data.partition(b" ")
        if not (length.isdigit() and len(length) < 10 and len(length) + 2 < int(length) <= len(data)):
            raise _Bad(f"bad header: PAX records that begin with {data[:24]!r}")
        key, equals, value = rest[:int(length) - len(length) - 2].partition(b"=")
        if not equals or data[int(length) - 1:int(length)] != b"\n":
            raise _Bad(f"bad header: PAX records that begin with {data[:24]!r}")
        records[key.decode("utf-8", "surrogateescape")] = value.decode("utf-8", "surrogateescape")
        data = data[int(length):]
    return records


def _not_a_tar(block: bytes) -> str:
    if block[:2] == b"\x1f\x8b":
        return "this is gzip data, into which there is no random access: unpack it with gunzip first"
    return f"not a tar file, it begins with {block[:24]!r}"


def _next_header(file: File, at: int, end: int) -> int | None:
    while at + BLOCK <= end:
        chunk = file.read(min(_LOOKED_THROUGH, end - at), at)
        for place in range(0, len(chunk) - BLOCK + 1, BLOCK):
            if chunk.startswith(b"ustar", place + 257) and _is_header(chunk[place:place + BLOCK]):
                return at + place
        at += _LOOKED_THROUGH
    return None


def _is_header(block: bytes) -> bool:
    try:
        _parse(block)
    except _Bad:
        return False
    return True


def _after_end(file: File, at: int, end: int) -> Generator[Fault, None, int | None]:
    """Behind the zero blocks nothing should follow. Returns where there are members all the same: of a second archive,
    or of this one behind a header that became zeros."""
    place = at
    while place < end:
        chunk = file.read(_LOOKED_THROUGH, place)
        used = len(chunk) - len(chunk.lstrip(b"\0"))
        if used < len(chunk):
            first = place + used // BLOCK * BLOCK
            again = _next_header(file, first, end)
            if again is None:
                yield Fault(first, f"{end - first} bytes follow the end of the archive", harmless=True)
            elif again == first:
                yield Fault(first, "a second archive follows the end of the first, where other readers stop: "
                                   "unpack both and make one")
            else:
                yield Fault(at, f"zeros where a header should be, and members again from byte {again} on: other "
                                "readers stop here")
            return again
        place += max(len(chunk), 1)
    return None
