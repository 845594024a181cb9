"""Samples of shards: which there are, where their fields lie, and which were left out and why."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from forge.data.dropping import Dropped
from forge.data.fields import Field, Text
from forge.data.index import Index, open_index
from forge.data.listing import Listed, listed
from forge.data.naming import ABSENT, KeyDot, alternatives
from forge.data.storage import Location, readable
from forge.data.texts import Copies, Texts, no_copies
from forge.errors import ConfigError, UnreadableError
from forge.notes import say


@dataclass(frozen=True, eq=False)
class Samples:
    """Samples with a text and other fields, by position. Holds places, not data, and can be sent to a worker process.

    others: field -> its data; its size is -1 where a sample does not have it. A field that is several members ("img.*")
        is as many of these as any sample has, called "name[0]", "name[1]", ...
    streams: [samples] int32, which of the named sets of shards a sample is from.
    numbers: [samples] int64, the place of each among all that were complete.
    """

    texts: Texts
    others: Mapping[str, Texts]
    streams: np.ndarray
    numbers: np.ndarray

    def __len__(self) -> int:
        return len(self.texts)

    def selected(self, chosen: np.ndarray) -> Samples:
        """chosen: [samples] bool."""
        return replace(self, texts=self.texts.selected(chosen), streams=self.streams[chosen],
                       numbers=self.numbers[chosen],
                       others={name: of.selected(chosen) for name, of in self.others.items()})

    def copied(self, copies: Copies) -> Samples:
        """Read from copies of the shards where there are such."""
        return replace(self, texts=self.texts.copied(copies),
                       others={name: of.copied(copies) for name, of in self.others.items()})

    @property
    def num_bytes(self) -> np.ndarray:
        """[samples] int64, of all fields of each."""
        sizes = [np.maximum(of.sizes, 0) for of in (self.texts, *self.others.values())]
        summed: np.ndarray = np.stack(sizes).sum(axis=0)
        return summed

    def columns(self, name: str) -> list[Texts]:
        """All that a field is."""
        return [of for column, of in self.others.items() if column == name or column.startswith(f"{name}[")]

    def shown(self, names: Iterable[str]) -> Texts:
        """The first of these fields that each sample has; its text, where it has none."""
        shown = self.texts
        for column in reversed([column for name in names for column in self.columns(name)]):
            shown = shown.but(column)
        return shown

    @property
    def fingerprint(self) -> str:
        """Of the data and their order; not of where they lie. That of the texts, where they are all."""
        if not self.others:
            return self.texts.fingerprint
        digest = hashlib.blake2b(self.texts.fingerprint.encode(), digest_size=16)
        for name, of in sorted(self.others.items()):
            digest.update(f"{name} {of.fingerprint}".encode())
        return digest.hexdigest()


def open_samples(streams: Mapping[str, Sequence[Location]], text: Text, others: Mapping[str, Field], key_dot: KeyDot,
                 dropped: Dropped, cache: Path) -> Samples:
    """The complete samples. What was left out is counted in `dropped`, whose shards are those of all streams in turn.

    Raises ConfigError where no sample is complete, UnreadableError where too many are bad or nothing can be read, and
    UnusableEnvironment where the system does not give a shard.
    """
    fields = {"": text, **others}
    files: list[tuple[Location, int, int]] = []
    columns = _Columns()
    seen: set[str] = set()
    for stream, shards in enumerate(streams.values()):
        _say_indexing(shards)
        for path in shards:
            index = _index(path, len(files), dropped, cache)
            found = listed(index, fields, key_dot)
            for why, offset in found.left_out:
                dropped.missed(len(files), why, offset)
            columns.add(index, len(files), found, stream)
            files.append((index.path, index.size, index.version))
            seen.update(found.fields)
    if not columns.num_samples:
        _refuse(streams, text, seen, dropped)
    dropped.opened(columns.num_samples)
    if columns.num_invalid:
        say(f"{columns.num_invalid:,} texts that are not UTF-8 are kept ({named_shards(dropped.shards)}); "
            "data.invalid_utf8=drop leaves them out.")
    return columns.joined(tuple(files))


def _index(path: Location, number: int, dropped: Dropped, cache: Path) -> Index:
    """Damage is counted as a bad sample, since how many were lost by it is not known."""
    index = open_index(path, cache)
    for fault in index.faults:
        if not fault.harmless:
            dropped.missed(number, "a damaged shard", fault.offset)
    return index


class _Column(NamedTuple):
    """A field of the samples of one shard, as in Texts."""

    shards: np.ndarray
    offsets: np.ndarray
    sizes: np.ndarray
    checksums: np.ndarray
    marks: np.ndarray
    sides: np.ndarray

    @staticmethod
    def of(index: Index, number: int, members: np.ndarray) -> _Column:
        there = members != ABSENT

        def taken(values: np.ndarray, absent: int) -> np.ndarray:
            column = np.full((len(members), *values.shape[1:]), absent, values.dtype)
            column[there] = values[members[there]]
            return column

        marks = taken(index.marks, 0)
        return _Column(np.where(there, number, 0).astype(np.int32), taken(index.offsets, 0),
                       taken(index.sizes, ABSENT) - 3 * marks, taken(index.checksums, 0), marks,
                       taken(index.pictures, 0))

    @staticmethod
    def absent(count: int) -> _Column:
        def full(dtype: type, value: int = 0) -> np.ndarray:
            return np.full(count, value, dtype)

        return _Column(full(np.int32), full(np.int64), full(np.int64, ABSENT), full(np.uint32), full(np.bool_),
                       np.zeros((count, 2), np.int32))


class _Columns:
    """The fields of samples, shard after shard, without what else the indices hold."""

    def __init__(self) -> None:
        self._shards: list[tuple[int, int, dict[str, _Column]]] = []        # samples, stream, fields
        self.num_samples, self.num_invalid = 0, 0

    def add(self, index: Index, number: int, found: Listed, stream: int) -> None:
        self._shards.append((found.num_samples, stream, {name: _Column.of(index, number, members)
                                                         for name, members in found.columns.items()}))
        self.num_samples += found.num_samples
        self.num_invalid += int((index.characters[found.columns[""]] < 0).sum())

    def joined(self, files: tuple[tuple[Location, int, int], ...]) -> Samples:
        """What was added, which is then let go of."""
        names = dict.fromkeys(name for _, _, columns in self._shards for name in columns)
        texts = {name: self._texts(name, files) for name in names}
        counts, streams = [count for count, _, _ in self._shards], [stream for _, stream, _ in self._shards]
        return Samples(texts.pop(""), texts, np.repeat(np.array(streams, np.int32), counts),
                       np.arange(self.num_samples))

    def _texts(self, name: str, files: tuple[tuple[Location, int, int], ...]) -> Texts:
        parts = [columns.pop(name) if name in columns else _Column.absent(count) for count, _, columns in self._shards]
        shards, offsets, sizes, checksums, marks, sides = map(np.concatenate, zip(*parts, strict=True))
        return Texts(files, shards, offsets, sizes, checksums, marks, sides, no_copies)


def _refuse(streams: Mapping[str, Sequence[Location]], text: Text, seen: set[str], dropped: Dropped) -> None:
    """There is no sample. Raises UnreadableError where nothing but damage was found, else ConfigError."""
    named = named_shards([path for shards in streams.values() for path in shards])
    why = f" Dropped were {dropped.sentence()}." if dropped.counts else ""
    if not seen and dropped.counts:
        raise UnreadableError(f"No sample in {named} can be read.{why}")
    if not seen:
        raise ConfigError(f"No sample in {named} has the field {text.setting}={text.names}; they hold no samples.")
    if any(name in seen for name in alternatives(text.names)):
        raise ConfigError(f"No sample in {named} has all that it must have.{why}")
    listed = ", ".join(sorted(seen)[:12]) + (", ..." if len(seen) > 12 else "")
    dotted = [name for name in seen if name.rpartition(".")[2] in alternatives(text.names)]
    mend = (" These names have dots before the field: set data.key_dot=last." if dotted else "")
    raise ConfigError(f"No sample in {named} has the field {text.setting}={text.names}; their fields are {listed}."
                      f"{mend}")


def _say_indexing(shards: Sequence[Location]) -> None:
    new = [path for path in shards if isinstance(path, Path) and not path.with_name(path.name + ".index").exists()]
    num_bytes = sum(path.stat().st_size for path in new if readable(path))
    if num_bytes > 1 << 30:
        say(f"Reading {num_bytes / 1e9:.1f} GB of shards once, to index them ({named_shards(shards)}).")


def named_shards(shards: Sequence[Location]) -> str:
    if len(shards) == 1:
        return str(shards[0])
    return f"{str(shards[0]).rpartition('/')[0]} ({len(shards)} shards)"
