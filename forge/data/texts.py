"""Texts of WebDataset shards, by position."""

from __future__ import annotations

import hashlib
import os
import re
import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import numpy as np

from forge.data.index import Index, open_index
from forge.errors import ConfigError, UnreadableError
from forge.notes import say

_NAME = re.compile(r"((?:.*/|)[^.]+)[.]([^/]*)", re.DOTALL)     # webdataset's: the key ends at the first dot
_META = re.compile(r"__[^/]*__($|/)")                           # members that webdataset keeps for itself


def key_and_field(name: str) -> tuple[str, str] | None:
    """What webdataset calls them: "a/b.seg.png" is field "seg.png" of sample "a/b". None: no part of a sample."""
    match = None if is_meta(name) else _NAME.fullmatch(name)
    return (match[1], match[2].lower()) if match else None


def is_meta(name: str) -> bool:
    return _META.match(name) is not None


def samples(names: Sequence[str]) -> tuple[list[tuple[str, dict[str, int]]], list[tuple[int, str]]]:
    """(key, {field: member}) for each run of members with one key; and the members that repeat others, and which."""
    found: list[tuple[str, dict[str, int]]] = []
    repeated: list[tuple[int, str]] = []
    for member, name in enumerate(names):
        if (parts := key_and_field(name)) is None:
            continue
        key, field = parts
        if not found or found[-1][0] != key:
            found.append((key, {}))
        if field in found[-1][1]:
            repeated.append((member, f"sample {key!r} has field {field!r} twice"))
        found[-1][1][field] = member
    return found, repeated


@dataclass(frozen=True, eq=False)
class Texts:
    """One text field of the samples of some shards. Holds places, not texts, and can be sent to a worker process.

    files: path, size and mtime_ns of each shard. shards: [samples] int32, which of them. offsets, sizes: [samples]
    int64, bytes. checksums: [samples] uint32.
    """

    files: tuple[tuple[Path, int, int], ...]
    shards: np.ndarray
    offsets: np.ndarray
    sizes: np.ndarray
    checksums: np.ndarray

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, index: int) -> bytes:
        """Raises UnreadableError where the bytes are not those that were indexed."""
        place = self.files[self.shards[index]]
        offset, size = int(self.offsets[index]), int(self.sizes[index])
        try:
            text = os.pread(_opened(*place).descriptor, size, offset)
        except OSError as error:
            raise UnreadableError(f"Cannot read {self.place(index)} ({error.strerror}).") from error
        if zlib.crc32(text) != self.checksums[index]:
            raise UnreadableError(f"{self.place(index)}: the text here is not what it was when the shard was indexed: "
                                  "the shard changed, or its disk is failing. Fetch or make the shard again.")
        return text

    def place(self, index: int) -> str:
        return f"{self.files[self.shards[index]][0]}, byte {self.offsets[index]}"

    def selected(self, chosen: np.ndarray) -> Texts:
        """chosen: [samples] bool."""
        return replace(self, shards=self.shards[chosen], offsets=self.offsets[chosen], sizes=self.sizes[chosen],
                       checksums=self.checksums[chosen])

    @property
    def fingerprint(self) -> str:
        """Of the texts and their order; not of where they lie."""
        digest = hashlib.blake2b(digest_size=16)
        digest.update(self.sizes.astype("<i8").tobytes())
        digest.update(self.checksums.astype("<u4").tobytes())
        return digest.hexdigest()


def open_texts(shards: Sequence[Path], field: str, cache: Path) -> Texts:
    """Raises UnreadableError for a damaged shard, and ConfigError where no sample has the field."""
    _say_indexing(shards)
    indices = [open_index(path, cache) for path in shards]
    places: list[tuple[int, int]] = []
    others: Counter[str] = Counter()
    num_without = 0
    for number, index in enumerate(indices):
        for _, fields in _samples(index):
            if field in fields:
                places.append((number, fields[field]))
            else:
                num_without += 1
                others.update(fields)
    if not places:
        has = f"their fields are {', '.join(sorted(others))}" if others else "they hold no samples"
        raise ConfigError(f"No sample in {_named(shards)} has the field data.text_field={field}; {has}.")
    if num_without:
        say(f"{num_without} samples without the field {field!r} are left out ({_named(shards)}).")
    return Texts(tuple((index.path, index.size, index.mtime_ns) for index in indices),
                 np.array([number for number, _ in places], np.int32),
                 _gathered(places, [index.offsets for index in indices]),
                 _gathered(places, [index.sizes for index in indices]),
                 _gathered(places, [index.checksums for index in indices]))


def _samples(index: Index) -> list[tuple[str, dict[str, int]]]:
    found, repeated = samples(index.names)
    for member, why in repeated:
        raise UnreadableError(f"{index.path}, byte {index.offsets[member]}: {why}. Make the shard again with "
                              "unique keys.")
    return found


def _gathered(places: list[tuple[int, int]], columns: list[np.ndarray]) -> np.ndarray:
    return np.array([columns[number][member] for number, member in places], columns[0].dtype)


def _say_indexing(shards: Sequence[Path]) -> None:
    num_bytes = sum(path.stat().st_size for path in shards if not path.with_name(path.name + ".index").exists())
    if num_bytes > 1 << 30:
        say(f"Reading {num_bytes / 1e9:.1f} GB of shards once, to index them ({_named(shards)}).")


def _named(shards: Sequence[Path]) -> str:
    return str(shards[0]) if len(shards) == 1 else f"{shards[0].parent} ({len(shards)} shards)"


class _Opened:
    """A file that is open for as long as someone holds this. pread has no position, so workers may share it."""

    descriptor = -1

    def __init__(self, path: Path) -> None:
        self.descriptor = os.open(path, os.O_RDONLY)

    def __del__(self) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)


@lru_cache(maxsize=64)      # open files a process; reading from more shards than that opens them again
def _opened(path: Path, size: int, mtime_ns: int) -> _Opened:
    return _Opened(path)    # size and mtime_ns tell a shard that was made anew under the same name from the old one
