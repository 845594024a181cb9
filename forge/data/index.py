"""The side index of a shard: where each member lies, and the checksum its bytes had when the index was made."""

from __future__ import annotations

import hashlib
import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from forge.data.disk import replacing
from forge.data.tar import Fault, Member, walk
from forge.errors import UnreadableError, UnusableEnvironment
from forge.notes import say

_FORMAT = 1             # of the index file; another number is made anew
_CHUNK = 1 << 20        # bytes read at a time for a checksum


@dataclass(frozen=True, eq=False)
class Index:
    """The members of one shard, in order.

    size, mtime_ns: of the shard when it was indexed; a shard that has others is indexed again.
    offsets, sizes: [members] int64, bytes. checksums: [members] uint32, CRC-32 of each member's data.
    """

    path: Path
    size: int
    mtime_ns: int
    names: list[str]
    offsets: np.ndarray
    sizes: np.ndarray
    checksums: np.ndarray


def open_index(path: Path, cache: Path) -> Index:
    """The index of a shard: the one beside it or in `cache` if it is up to date, else made and kept for next time.

    Raises UnreadableError, naming the byte, for a shard that is damaged.
    """
    for place in _places(path, cache):
        if (index := load(place, path)) is not None and is_current(index):
            return index
    index = make_index(path)
    for place in _places(path, cache):
        with suppress(OSError):
            place.parent.mkdir(parents=True, exist_ok=True)
            save(index, place)
            break
    return index


def kept_index(path: Path, cache: Path) -> Index | None:
    """The index that was made of a shard, even if the shard has changed since."""
    found = (load(place, path) for place in _places(path, cache))
    return next((index for index in found if index is not None), None)


def _places(path: Path, cache: Path) -> list[Path]:
    """Beside the shard, and for a shard in a folder where this user cannot write, in the cache."""
    name = hashlib.blake2b(os.fsencode(path.absolute()), digest_size=16).hexdigest()
    return [path.with_name(path.name + ".index"), cache / "index" / f"{name}.index"]


def is_current(index: Index) -> bool:
    with suppress(OSError):
        stat = index.path.stat()
        return (stat.st_size, stat.st_mtime_ns) == (index.size, index.mtime_ns)
    return False


def make_index(path: Path) -> Index:
    """Walk a shard and read all of it. Raises UnreadableError at the first fault, and says the harmless ones."""
    members, checksums = [], []
    with opened(path) as descriptor:
        before = os.fstat(descriptor)
        for found in walk(descriptor):
            if isinstance(found, Member):
                members.append(found)
                checksums.append(checksum(descriptor, found))
            elif found.harmless:
                say(f"{described(path, found)}.")
            else:
                raise UnreadableError(f"{described(path, found)}. Fetch or make the shard again.")
    return Index(path, before.st_size, before.st_mtime_ns, [member.name for member in members],
                 np.array([member.offset for member in members], np.int64),
                 np.array([member.size for member in members], np.int64), np.array(checksums, np.uint32))


def described(path: Path, fault: Fault) -> str:
    return f"{path}, byte {fault.offset}: {fault.reason}"


def checksum(descriptor: int, member: Member) -> int:
    """CRC-32 of a member's data, as it is on the disk now."""
    value, at, end = 0, member.offset, member.offset + member.size
    while at < end:
        chunk = os.pread(descriptor, min(_CHUNK, end - at), at)
        if not chunk:
            break               # the file shrank since it was walked; the checksum will not match
        value, at = zlib.crc32(chunk, value), at + len(chunk)
    return value


@contextmanager
def opened(path: Path) -> Iterator[int]:
    """A descriptor for reading. Raises UnusableEnvironment where the system does not give one or stops reading."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            yield descriptor
        finally:
            os.close(descriptor)
    except OSError as error:
        raise UnusableEnvironment(f"Cannot read {path} ({error.strerror}): check that the file is there, that you may "
                                  "read it, and that its disk is well.") from error


def save(index: Index, place: Path) -> None:
    """Write the index file: a .npz, which holds plain arrays and nothing that could run."""
    names = "\0".join(index.names).encode("utf-8", "surrogateescape")
    with replacing(place) as file:
        np.savez(file, head=np.array([_FORMAT, index.size, index.mtime_ns, len(index.names)], np.int64),
                 names=np.frombuffer(names, np.uint8), offsets=index.offsets, sizes=index.sizes,
                 checksums=index.checksums)


def load(place: Path, path: Path) -> Index | None:
    """The index of shard `path` that is kept in file `place`; None where there is none, or none that can be read."""
    try:
        with np.load(place, allow_pickle=False) as file:
            version, size, mtime_ns, num_members = map(int, file["head"])
            names = file["names"].tobytes().decode("utf-8", "surrogateescape").split("\0") if num_members else []
            index = Index(path, size, mtime_ns, names, file["offsets"], file["sizes"], file["checksums"])
    except Exception:           # whatever a damaged index file makes of itself, a new one is made from the shard
        return None
    whole = len(names) == len(index.offsets) == len(index.sizes) == len(index.checksums) == num_members
    return index if whole and version == _FORMAT else None
