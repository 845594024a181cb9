"""One look at every id of a file: where documents end, the largest id, and whether all is as it should be."""

from __future__ import annotations

import hashlib
import zipfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from forge.data.disk import replacing, writing
from forge.data.hashing import LAST_SHIFT, STEP, stirred
from forge.data.token_format import Layout
from forge.errors import UnreadableError
from forge.notes import say

_BLOCK = 1 << 22            # ids at a time
_SAID_FROM = 1 << 30        # bytes: reading so many takes seconds, which a user should know of
_ENOUGH = 64                # ids that tell a wrong dtype from chance


@dataclass(frozen=True, eq=False)
class Scan:
    """ends: [documents] int64, the place behind the last id of each. hashes: [documents] uint64, of the ids of each.
    largest, at: the largest id, and its first place. checksum: blake2b of the file, 128 bits."""

    ends: np.ndarray
    hashes: np.ndarray
    largest: int
    at: int
    checksum: str


def scanned(layout: Layout, end: int | None, cache: Path) -> Scan:
    """The scan of a file, made once and kept in the cache folder for as long as the file does not change. end: the id
    that ends a document; None: the file is one. Raises UnreadableError."""
    key = f"{layout.path.absolute()}\0{layout.size}\0{layout.mtime_ns}\0{layout.dtype}\0{layout.offset}\0{end}"
    name = hashlib.blake2b(key.encode(errors="surrogateescape"), digest_size=16).hexdigest()
    kept = cache / "token_files" / f"{name}.npz"
    scan = _kept(kept)
    if scan is None:
        if layout.size >= _SAID_FROM:
            say(f"Reading {layout.path} ({layout.size / 1e9:.1f} GB) once, to check every token id.")
        scan = _scan(layout, end)
        with writing(kept.parent, "set data.cache to another folder"):
            kept.parent.mkdir(parents=True, exist_ok=True)
            with replacing(kept) as file:
                np.savez(file, ends=scan.ends, hashes=scan.hashes, numbers=np.array([scan.largest, scan.at]),
                         checksum=np.array(scan.checksum))
    if layout.sidecar is not None and layout.sidecar.checksum != scan.checksum:
        raise UnreadableError(f"{layout.path} is not what its sidecar was written for: their checksums differ. Make it "
                              f"again, or, if the file is right, delete {layout.path.name}.json and set data.dtype.")
    return scan


def _kept(path: Path) -> Scan | None:
    with suppress(OSError, ValueError, KeyError, zipfile.BadZipFile), np.load(path, allow_pickle=False) as kept:
        largest, at = kept["numbers"].tolist()
        return Scan(kept["ends"], kept["hashes"], largest, at, str(kept["checksum"]))
    return None


def _scan(layout: Layout, end: int | None) -> Scan:
    digest = hashlib.blake2b(digest_size=16)
    ends: list[np.ndarray] = []
    hashes: list[np.ndarray] = []
    open_hash = np.zeros(1, np.uint64)
    largest, at, odd, even = -1, 0, 0, 0
    with open(layout.path, "rb") as file:
        digest.update(file.read(layout.offset))
        for first in range(0, layout.count, _BLOCK):
            read = file.read(min(_BLOCK, layout.count - first) * np.dtype(layout.dtype).itemsize)
            digest.update(read)
            ids = np.frombuffer(read, layout.dtype).astype(np.int64)
            if len(ids) < min(_BLOCK, layout.count - first):
                raise UnreadableError(f"{layout.path} became shorter while it was read.")
            if (ids < 0).any():
                raise UnreadableError(f"{layout.path}: token {first + int(np.argmax(ids < 0)):,} is negative.")
            if ids.max() > largest:
                largest, at = int(ids.max()), first + int(ids.argmax())
            even = max(even, int(ids[first % 2::2].max(initial=0)))
            odd = max(odd, int(ids[1 - first % 2::2].max(initial=0)))
            stops = np.flatnonzero(ids == end) + 1 if end is not None else np.zeros(0, np.int64)
            sums = np.add.reduceat(np.append(_mixed(ids), np.uint64(0)), np.append(0, stops))
            sums[:1] += open_hash
            open_hash = sums[-1:]
            ends.append(first + stops)
            hashes.append(sums[:-1])
    if layout.dtype[1:] == "u2" and odd < 16 <= even and layout.count >= _ENOUGH:
        raise UnreadableError(f"{layout.path} was read as uint16, and every second id is below 16: its numbers are "
                              f"uint32. Set data.dtype=uint32.")
    stops = np.concatenate([np.zeros(0, np.int64), *ends])
    if layout.count > (stops[-1] if len(stops) else 0):         # a tail that nothing ends is a document
        stops, hashes = np.append(stops, layout.count), [*hashes, open_hash]
    return Scan(stops, np.concatenate([np.zeros(0, np.uint64), *hashes]), largest, at, digest.hexdigest())


def _mixed(ids: np.ndarray) -> np.ndarray:
    """A hash of each id, splitmix64 without its second round. Their sum says which documents are copies, however they
    lie in blocks."""
    mixed = stirred((ids.astype(np.uint64) + np.uint64(1)) * np.uint64(STEP), num_rounds=1)
    hashes: np.ndarray = mixed ^ mixed >> np.uint64(LAST_SHIFT)
    return hashes
