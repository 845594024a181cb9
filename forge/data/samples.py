"""Samples of shards: which there are, where their fields lie, and which were left out and why."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from forge.data.dropping import Dropped
from forge.data.fields import Field, Seen, Text
from forge.data.index import Index, open_index
from forge.data.naming import Grouping, KeyDot, alternatives, members_of, samples
from forge.data.storage import Location, readable
from forge.data.texts import Copies, Texts, no_copies
from forge.errors import ConfigError, UnreadableError
from forge.notes import say

_ABSENT = -1        # a member that a sample does not have


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
    places: dict[str, list[tuple[int, int]]] = {name: [] for name, field in fields.items() if "*" not in field.names}
    indices: list[Index] = []
    of_streams: list[int] = []
    seen: Counter[str] = Counter()
    for stream, shards in enumerate(streams.values()):
        _say_indexing(shards)
        for path in shards:
            indices.append(_index(path, len(indices), dropped, cache))
            for members in _complete(indices[-1], len(indices) - 1, fields, key_dot, dropped, seen):
                for name, member in members.items():
                    _fill(places.setdefault(name, []), len(of_streams))
                    places[name].append((len(indices) - 1, member))
                of_streams.append(stream)
    if not of_streams:
        _refuse(streams, text, seen, dropped)
    for column in places.values():
        _fill(column, len(of_streams))
    dropped.opened(len(of_streams))
    if invalid := sum(bool(indices[shard].characters[member] < 0) for shard, member in places[""]):
        say(f"{invalid:,} texts that are not UTF-8 are kept ({named_shards(dropped.shards)}); data.invalid_utf8=drop "
            "leaves them out.")
    columns = {name: _column(indices, of) for name, of in places.items()}
    return Samples(columns.pop(""), columns, np.array(of_streams, np.int32), np.arange(len(of_streams)))


def _fill(column: list[tuple[int, int]], count: int) -> None:
    """The samples that came since do not have this member."""
    column += [(0, _ABSENT)] * (count - len(column))


def _index(path: Location, number: int, dropped: Dropped, cache: Path) -> Index:
    """Damage is counted as a bad sample, since how many were lost by it is not known."""
    index = open_index(path, cache)
    for fault in index.faults:
        if not fault.harmless:
            dropped.missed(number, "a damaged shard", fault.offset)
    return index


def _complete(index: Index, number: int, fields: Mapping[str, Field], key_dot: KeyDot, dropped: Dropped,
              seen: Counter[str]) -> Iterator[dict[str, int]]:
    """The members of each sample that has all it must have, by field."""
    grouping = samples(index.names, key_dot)
    _say_passed(index, grouping)
    twice = {member for member, _ in grouping.repeated}
    for _, found in grouping.samples:
        seen.update(found)
        start = min(int(index.offsets[member]) for member in found.values())
        if twice and twice & set(found.values()):
            dropped.missed(number, "a field that is there twice", start)
            continue
        members: dict[str, int] = {}
        for name, field in fields.items():
            of_field = members_of(field.names, found)
            why = _refusal(index, of_field, field)
            if why is not None:
                dropped.missed(number, why, start)
                break
            several = "*" in field.names
            members |= {f"{name}[{place}]" if several else name: member for place, member in enumerate(of_field)}
        else:
            yield members


def _refusal(index: Index, members: list[int], field: Field) -> str | None:
    if not members and field.required:
        return f"a missing field {field.names}"
    seen = (Seen(int(index.sizes[member]), int(index.characters[member]), *index.pictures[member].tolist())
            for member in members)
    return next(filter(None, map(field.refusal, seen)), None)


def _refuse(streams: Mapping[str, Sequence[Location]], text: Text, seen: Counter[str], dropped: Dropped) -> None:
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


def _column(indices: list[Index], places: list[tuple[int, int]]) -> Texts:
    def gathered(columns: list[np.ndarray], absent: int | tuple[int, int], dtype: type) -> np.ndarray:
        return np.array([absent if member == _ABSENT else columns[shard][member] for shard, member in places], dtype)

    marks = gathered([index.marks for index in indices], 0, np.bool_)
    return Texts(tuple((index.path, index.size, index.version) for index in indices),
                 np.array([shard for shard, _ in places], np.int32),
                 gathered([index.offsets for index in indices], 0, np.int64),
                 gathered([index.sizes for index in indices], _ABSENT, np.int64) - 3 * marks,
                 gathered([index.checksums for index in indices], 0, np.uint32), marks,
                 gathered([index.pictures for index in indices], (0, 0), np.int32).reshape(-1, 2), no_copies)


def _say_passed(index: Index, grouping: Grouping) -> None:
    if grouping.passed:
        counts = ", ".join(f"{count} {kind}" for kind, count in sorted(grouping.passed.items()))
        say(f"{index.path}: {sum(grouping.passed.values())} members are no part of a sample: {counts}.")
    if grouping.scattered:
        say(f"{index.path}: {len(grouping.scattered)} samples do not lie in one piece, or share a key with others; the "
            "parts of one key are put together.")


def _say_indexing(shards: Sequence[Location]) -> None:
    new = [path for path in shards if isinstance(path, Path) and not path.with_name(path.name + ".index").exists()]
    num_bytes = sum(path.stat().st_size for path in new if readable(path))
    if num_bytes > 1 << 30:
        say(f"Reading {num_bytes / 1e9:.1f} GB of shards once, to index them ({named_shards(shards)}).")


def named_shards(shards: Sequence[Location]) -> str:
    if len(shards) == 1:
        return str(shards[0])
    return f"{str(shards[0]).rpartition('/')[0]} ({len(shards)} shards)"
