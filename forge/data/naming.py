"""How the names of members make samples: the rules of webdataset, and what it would lose by them is told."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Literal

import numpy as np

KeyDot = Literal["first", "last"]
ABSENT = -1         # a member that a sample does not have

_NAME = {"first": re.compile(r"((?:.*/|)[^.]+)[.]([^/]*)", re.DOTALL),          # webdataset's
         "last": re.compile(r"((?:.*/|)[^/]*[^/.][^/]*)[.]([^/.]*)", re.DOTALL)}
_META = re.compile(r"__[^/]*__($|/)")                           # members that webdataset keeps for itself
_JUNK = re.compile(r"(.*/|)(\._[^/]*|\.DS_Store|Thumbs\.db|desktop\.ini)|(.*/|)__MACOSX/.*", re.DOTALL | re.IGNORECASE)
_ODD = ("__", "._", ".ds_store", "thumbs.db", "desktop.ini")   # one of these is in all that _META and _JUNK match


@dataclass
class Grouping:
    """The members of a shard as samples.

    samples: (key, {field: member}). repeated: members that a sample has twice, and a sentence. scattered: members that
    begin a key a second time, and a sentence. passed: how many members are no part of a sample, by what they are.
    """

    samples: list[tuple[str, dict[str, int]]] = field(default_factory=list)
    repeated: list[tuple[int, str]] = field(default_factory=list)
    scattered: list[tuple[int, str]] = field(default_factory=list)
    passed: dict[str, int] = field(default_factory=dict)


def key_and_field(name: str, key_dot: KeyDot = "first") -> tuple[str, str] | None:
    """"a/b.seg.png" is field "seg.png" of sample "a/b", or, by the last dot, "png" of "a/b.seg". None: no part of a
    sample."""
    match = None if is_meta(name) or _JUNK.fullmatch(name) else _NAME[key_dot].fullmatch(name)
    return (match[1], match[2].lower()) if match else None


def is_meta(name: str) -> bool:
    return _META.match(name) is not None


def samples(names: Sequence[str], key_dot: KeyDot = "first") -> Grouping:
    """A sample is a run of members with one key. A later run of that key is the rest of the sample where it has other
    fields (a tar whose names were not sorted), and else a sample of its own, as in webdataset."""
    grouping = Grouping()
    newest: dict[str, dict[str, int]] = {}
    last: str | None = None
    for member, parts in enumerate(_parsed(names, key_dot)):
        if parts is None:
            kind = _kind(names[member])
            grouping.passed[kind] = grouping.passed.get(kind, 0) + 1
            continue
        key, of_sample = parts
        if key != last:
            last, found = key, newest.get(key)
            if found is not None:
                grouping.scattered.append((member, f"sample {key!r} begins a second time: pack the fields of a sample "
                                                   "side by side (tar --sort=name), and give each a key of its own"))
            if found is None or of_sample in found:
                found = newest[key] = {}
                grouping.samples.append((key, found))
        assert found is not None
        if of_sample in found:
            grouping.repeated.append((member, f"sample {key!r} has field {of_sample!r} twice"))
        found[of_sample] = member
    return grouping


def _parsed(names: Sequence[str], key_dot: KeyDot) -> Iterator[tuple[str, str] | None]:
    """key_and_field of each, in half the time where no name is odd."""
    text = "\0".join(names).lower()
    if not text.isascii() or any(mark in text for mark in _ODD):
        return (key_and_field(name, key_dot) for name in names)
    matches = map(_NAME[key_dot].fullmatch, names)
    return ((match[1], match[2].lower()) if match else None for match in matches)


def _kind(name: str) -> str:
    if is_meta(name):
        return "of webdataset itself"
    return "left by a file manager" if _JUNK.fullmatch(name) else "without a field in the name"


@dataclass(frozen=True, eq=False)
class Members:
    """What samples are made of, in their order: `members` of a shard, [all] int64. samples: [all] int64, the number of
    the sample that each belongs to; fields: [all] int64, its field among `names`. num_samples: all have a member."""

    num_samples: int
    names: list[str]
    samples: np.ndarray
    fields: np.ndarray
    members: np.ndarray

    @staticmethod
    def of(grouping: Grouping) -> Members:
        parts = [found for _, found in grouping.samples]
        counts = np.array([len(found) for found in parts], np.int64)
        names = list(dict.fromkeys(chain.from_iterable(parts)))
        numbers = {name: number for number, name in enumerate(names)}
        fields = map(numbers.__getitem__, chain.from_iterable(parts))
        members = chain.from_iterable(found.values() for found in parts)
        return Members(len(parts), names, np.repeat(np.arange(len(parts)), counts), np.fromiter(fields, np.int64),
                       np.fromiter(members, np.int64))

    def of_field(self, names: str) -> list[np.ndarray]:
        """[samples] int64: of each sample, the member of the first of the alternatives ("jpg;jpeg") that it has, or
        ABSENT. An alternative with a * is all fields that match it ("img.*"), 2 before 10: there are as many of these
        arrays as any sample has such fields, and at least one."""
        columns = [np.full(self.num_samples, ABSENT)]
        without = np.ones(self.num_samples, bool)
        for name in alternatives(names):
            ranks = self._ranks(name)[self.fields]
            taken = np.flatnonzero((ranks >= 0) & without[self.samples])
            taken = taken[np.lexsort((ranks[taken], self.samples[taken]))]
            of = self.samples[taken]
            places = np.arange(len(of)) - np.searchsorted(of, of)
            for place in range(int(places.max(initial=-1)) + 1):
                if place == len(columns):
                    columns.append(np.full(self.num_samples, ABSENT))
                columns[place][of[places == place]] = self.members[taken[places == place]]
            without[of] = False
        return columns

    def _ranks(self, name: str) -> np.ndarray:
        """[names] int64: in which order the fields of an alternative come; ABSENT: a field is none of it."""
        matching = set(fnmatch.filter(self.names, name) if "*" in name else {name} & set(self.names))
        ranks = {number: rank for rank, number in enumerate(sorted({_by_number(field) for field in matching}))}
        return np.array([ranks[_by_number(field)] if field in matching else ABSENT for field in self.names], np.int64)


def _by_number(field: str) -> tuple[tuple[int, int, str], ...]:
    return tuple((0, int(part), "") if part.isdecimal() else (1, 0, part) for part in re.split(r"([0-9]+)", field))


def alternatives(names: str) -> list[str]:
    return [name.strip().lower() for name in names.split(";") if name.strip()]
