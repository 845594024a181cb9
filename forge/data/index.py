"""The side index of a shard: where each member lies, the checksum its bytes had when the index was made, how long its
text is and how large its picture; and what was wrong with the shard."""

from __future__ import annotations

import codecs
import hashlib
import io
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from forge.data.checksums import crc32
from forge.data.disk import locked, replacing
from forge.data.headers import BadPicture, read_header
from forge.data.storage import File, Location, beside, open_file, opened, status
from forge.data.tar import Fault, Member, walk
from forge.notes import say

_FORMAT = 2             # of the index file; another number is made anew
_COLUMNS = ("offsets", "sizes", "checksums", "characters", "marks", "pictures")
_CHUNK = 1 << 20        # bytes read at a time for a checksum
_LARGEST = (1 << 31) - 1
_SAID = 3               # faults of a shard that are told in full when it is indexed


@dataclass(frozen=True, eq=False)
class Index:
    """The members of one shard, in order.

    size, version: of the shard when it was indexed; a shard that has others is indexed again.
    offsets, sizes: [members] int64, bytes. checksums: [members] uint32, CRC-32 of each member's data.
    characters: [members] int64, of text in UTF-8, without a byte order mark; 0 where all are white space, -1 where the
        data is something else. marks: [members] bool, whether a byte order mark comes first.
    pictures: [members, 2] int32, width and height by the header; 0 where there is no header of a picture.
    faults: what the walk found.
    """

    path: Location
    size: int
    version: int
    names: list[str]
    offsets: np.ndarray
    sizes: np.ndarray
    checksums: np.ndarray
    characters: np.ndarray
    marks: np.ndarray
    pictures: np.ndarray
    faults: tuple[Fault, ...]


def open_index(path: Location, cache: Path) -> Index:
    """The index of a shard: the one beside it or in `cache` if it is up to date, else made and kept for next time. Of
    several processes that need it one makes it, and the others wait.

    Says what is wrong with the shard. Raises UnusableEnvironment where it cannot be read.
    """
    places = _places(path, cache)
    index = _current(path, places, cache)
    if index is None:
        with _alone(path, cache):
            # Meanwhile another process may have kept one, which it does on a disk of this machine
            index = _current(path, [place for place in places if isinstance(place, Path)], cache)
            if index is None:
                index = make_index(path)
                keep(index, cache)
    _say_faults(index)
    return index


def _current(path: Location, places: Sequence[Location], cache: Path) -> Index | None:
    """The index that is kept there, if it is up to date. One that lies at an address is fetched once."""
    for place in places:
        if (index := load(place, path)) is not None and is_current(index):
            if not isinstance(place, Path):
                keep(index, cache)
            return index
    return None


@contextmanager
def _alone(path: Location, cache: Path) -> Iterator[None]:
    """No other process with this cache folder indexes the shard meanwhile. Only saves work: where the cache cannot be
    written, each process does it."""
    lock = cache / "indexing" / f"{_digest(path)}.lock"
    with ExitStack() as held:
        with suppress(OSError):
            lock.parent.mkdir(parents=True, exist_ok=True)
            held.enter_context(locked(lock, f"Another process indexes {path}: waiting for it."))
            held.callback(lock.unlink, missing_ok=True)     # who waits on it finds the index made
        yield


def keep(index: Index, cache: Path) -> Location | None:
    """Write the index beside its shard, or in `cache`; None where neither takes it."""
    for place in _places(index.path, cache):
        if isinstance(place, Path):
            with suppress(OSError):
                place.parent.mkdir(parents=True, exist_ok=True)
                save(index, place)
                return place
    return None


def kept_index(path: Location, cache: Path) -> Index | None:
    """The index that was made of a shard, even if the shard has changed since."""
    found = (load(place, path) for place in _places(path, cache))
    return next((index for index in found if index is not None), None)


def _places(path: Location, cache: Path) -> list[Location]:
    """Beside the shard, and for a shard in a folder where this user cannot write, in the cache: first what lies on this
    machine."""
    kept = cache / "index" / f"{_digest(path)}.index"
    return sorted([beside(path, ".index"), kept], key=lambda place: isinstance(place, str))


def _digest(path: Location) -> str:
    """Of where a shard lies."""
    full = os.fsencode(path if isinstance(path, str) else path.absolute())
    return hashlib.blake2b(full, digest_size=16).hexdigest()


def is_current(index: Index) -> bool:
    with suppress(OSError):
        return status(index.path) == (index.size, index.version)
    return False


def make_index(path: Location) -> Index:
    """Walk a shard and read all of it. Raises UnusableEnvironment where it cannot be read."""
    members: list[Member] = []
    seen = []
    faults: list[Fault] = []
    with opened(path) as file:
        for found in walk(file):
            if isinstance(found, Member):
                members.append(found)
                seen.append(_read(file, found))
            else:
                faults.append(found)
    return Index(path, file.size, file.version, [member.name for member in members],
                 np.array([member.offset for member in members], np.int64),
                 np.array([member.size for member in members], np.int64),
                 np.array([each.checksum for each in seen], np.uint32),
                 np.array([each.characters for each in seen], np.int64), np.array([each.mark for each in seen], bool),
                 np.array([each.picture for each in seen], np.int32).reshape(-1, 2), tuple(faults))


def described(path: Location, fault: Fault) -> str:
    return f"{path}, byte {fault.offset}: {fault.reason}"


def checksum(file: File, member: Member) -> int:
    """CRC-32 of a member's data, as it is on the disk now."""
    value = 0
    for chunk in _chunks(file, member):
        value = crc32(chunk, value)
    return value


class _Seen(NamedTuple):
    checksum: int
    characters: int
    mark: bool
    picture: tuple[int, int]


def _read(file: File, member: Member) -> _Seen:
    value, text, first = 0, _Text(), b""
    for chunk in _chunks(file, member):
        first = first or chunk
        value = crc32(chunk, value)
        text.add(chunk)
    return _Seen(value, text.characters(), first.startswith(codecs.BOM_UTF8), _picture_size(file, member, first))


class _Text:
    """Counts the characters of UTF-8 that comes in chunks."""

    def __init__(self) -> None:
        self._decoder: codecs.IncrementalDecoder | None = codecs.getincrementaldecoder("utf-8-sig")()
        self._count, self._blank = 0, True

    def add(self, chunk: bytes, final: bool = False) -> None:
        if self._decoder is None:
            return
        try:
            decoded = self._decoder.decode(chunk, final)
        except UnicodeDecodeError:
            self._decoder = None
            return
        self._count += len(decoded)
        self._blank = self._blank and (not decoded or decoded.isspace())

    def characters(self) -> int:
        self.add(b"", final=True)
        return -1 if self._decoder is None else 0 if self._blank else self._count


def _chunks(file: File, member: Member) -> Iterator[bytes]:
    at, end = member.offset, member.offset + member.size
    while at < end:
        chunk = file.read(min(_CHUNK, end - at), at)
        if not chunk:
            return              # the file shrank since it was walked; the checksum will not match
        yield chunk
        at += len(chunk)


def _picture_size(file: File, member: Member, first: bytes) -> tuple[int, int]:
    def read(at: int, size: int) -> bytes:
        if at + size <= len(first) or len(first) == member.size:
            return first[at:at + size]
        return file.read(max(0, min(size, member.size - at)), member.offset + at)

    try:
        header = read_header(read)
    except BadPicture:
        return 0, 0
    return min(header.width, _LARGEST), min(header.height, _LARGEST)


def _say_faults(index: Index) -> None:
    grave = [fault for fault in index.faults if not fault.harmless]
    for fault in grave[:_SAID]:
        say(f"{described(index.path, fault)}. What is whole in this shard is read.")
    if len(grave) > _SAID:
        say(f"{index.path} has {len(grave) - _SAID} more faults: `python -m forge.shards check` lists them.")
    harmless = [fault for fault in index.faults if fault.harmless]
    for fault in harmless[:1]:
        more = f" ({len(harmless) - 1} more of this kind or another)" if len(harmless) > 1 else ""
        say(f"{described(index.path, fault)}{more}.")


def save(index: Index, place: Path) -> None:
    """Write the index file: a .npz, which holds plain arrays and nothing that could run."""
    names = "\0".join(index.names).encode("utf-8", "surrogateescape")
    faults = json.dumps([astuple(fault) for fault in index.faults]).encode()
    with replacing(place) as file:
        np.savez(file, head=np.array([_FORMAT, index.size, index.version, len(index.names)], np.int64),
                 names=np.frombuffer(names, np.uint8), faults=np.frombuffer(faults, np.uint8),
                 **{name: getattr(index, name) for name in _COLUMNS})


def load(place: Location, path: Location) -> Index | None:
    """The index of shard `path` that is kept in file `place`; None where there is none, or none that can be read."""
    try:
        with np.load(_stored(place), allow_pickle=False) as file:
            version, size, shard_version, num_members = map(int, file["head"])
            names = file["names"].tobytes().decode("utf-8", "surrogateescape").split("\0") if num_members else []
            faults = tuple(Fault(int(at), str(why), bool(harmless))
                           for at, why, harmless in json.loads(file["faults"].tobytes()))
            columns = {name: file[name] for name in _COLUMNS}
    except Exception:           # whatever a damaged index file makes of itself, a new one is made from the shard
        return None
    whole = version == _FORMAT and all(len(column) == num_members for column in [*columns.values(), names])
    return Index(path, size, shard_version, names, faults=faults, **columns) if whole else None


def _stored(place: Location) -> Path | io.BytesIO:
    if isinstance(place, Path):
        return place
    status(place)               # most often there is none: nothing is opened for that
    file = open_file(place)
    return io.BytesIO(file.read(file.size, 0))
