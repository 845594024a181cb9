"""One field of the samples of shards, by position."""

from __future__ import annotations

import codecs
import hashlib
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from forge.data.checksums import crc32
from forge.data.dropping import BadSample, Bound, Dropped
from forge.data.storage import File, Location, let_go, shared_file

PAUSES = (0.1, 1.0)         # seconds
_MARK = len(codecs.BOM_UTF8)

Copies = Callable[[Location, int, int], Iterable[File]]     # of a shard: where else its bytes lie. See shared_file


def patiently(file: tuple[Location, int, int], size: int, offset: int) -> bytes:
    """Read, and where storage fails, again after each pause of PAUSES, opened anew: most such failures pass, and a
    sample that is dropped for one makes a run another run. Raises the last OSError."""
    for pause in PAUSES:
        try:
            return shared_file(*file).read(size, offset)
        except OSError:
            time.sleep(pause)
            let_go()
    return shared_file(*file).read(size, offset)


@dataclass(frozen=True, eq=False)
class Texts:
    """One field of some samples, a text for example. Holds places, not data, and can be sent to a worker process.

    files: path, size and version of each shard. shards: [samples] int32, which of them. offsets, sizes: [samples]
    int64, bytes. checksums: [samples] uint32. marks: [samples] bool, whether a byte order mark comes before the `sizes`
    bytes and is left out. sides: [samples, 2] int32, width and height of a picture as it is stored. copies: files
    that are tried before the shard itself.
    """

    files: tuple[tuple[Location, int, int], ...]
    shards: np.ndarray
    offsets: np.ndarray
    sizes: np.ndarray
    checksums: np.ndarray
    marks: np.ndarray
    sides: np.ndarray
    copies: Copies

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, index: int) -> bytes:
        """Raises BadSample where the bytes are not those that were indexed."""
        shard = int(self.shards[index])
        before = _MARK if self.marks[index] else 0
        size, offset = int(self.sizes[index]) + before, int(self.offsets[index])
        for copy in self.copies(*self.files[shard]):
            data = copy.read(size, offset)
            if crc32(data) == self.checksums[index]:
                return data[before:]
        try:
            data = patiently(self.files[shard], size, offset)
        except OSError as error:
            raise BadSample(shard, "an error in reading",
                            f"Cannot read {self.place(index)} ({error.strerror or error}).") from error
        if crc32(data) != self.checksums[index]:
            raise BadSample(shard, "a change since it was indexed",
                            f"{self.place(index)}: the data here are not what they were when the shard was indexed: "
                            "the shard changed, or its disk is failing. Fetch or make the shard again.")
        return data[before:]

    def place(self, index: int) -> str:
        return f"{self.files[self.shards[index]][0]}, byte {self.offsets[index]}"

    def selected(self, chosen: np.ndarray) -> Texts:
        """chosen: [samples] bool."""
        return replace(self, shards=self.shards[chosen], offsets=self.offsets[chosen], sizes=self.sizes[chosen],
                       checksums=self.checksums[chosen], marks=self.marks[chosen], sides=self.sides[chosen])

    def but(self, others: Texts) -> Texts:
        """`others`, of the same shards, where they are there (their size is not negative), else these."""
        there = others.sizes >= 0

        def taken(ours: np.ndarray, theirs: np.ndarray) -> np.ndarray:
            return np.where(there.reshape(-1, *[1] * (ours.ndim - 1)), theirs, ours)

        return Texts(self.files, taken(self.shards, others.shards), taken(self.offsets, others.offsets),
                     taken(self.sizes, others.sizes), taken(self.checksums, others.checksums),
                     taken(self.marks, others.marks), taken(self.sides, others.sides), self.copies)

    def copied(self, copies: Copies) -> Texts:
        return replace(self, copies=copies)

    @property
    def fingerprint(self) -> str:
        """Of the data and their order; not of where they lie."""
        digest = hashlib.blake2b(digest_size=16)
        digest.update(self.sizes.astype("<i8").tobytes())
        digest.update(self.checksums.astype("<u4").tobytes())
        return digest.hexdigest()


def no_copies(location: Location, size: int, version: int) -> Iterable[File]:
    """Shards are read where they lie."""
    return ()


def open_texts(shards: Sequence[Location], field: str, cache: Path) -> Texts:
    """The texts of shards that must be whole. Raises UnreadableError where a sample had to be left out, and
    ConfigError where none has the field."""
    from forge.data.fields import Text
    from forge.data.samples import open_samples

    dropped = Dropped(shards, Bound(0.0, 0))
    text = Text(field, keep_empty=True, invalid_utf8="drop")
    return open_samples({"": shards}, text, {}, "first", dropped, cache).texts
