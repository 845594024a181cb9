"""How the names of members make samples: the rules of webdataset, and what it would lose by them is told."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

KeyDot = Literal["first", "last"]

_NAME = {"first": re.compile(r"((?:.*/|)[^.]+)[.]([^/]*)", re.DOTALL),          # webdataset's
         "last": re.compile(r"((?:.*/|)[^/]*[^/.][^/]*)[.]([^/.]*)", re.DOTALL)}
_META = re.compile(r"__[^/]*__($|/)")                           # members that webdataset keeps for itself
_JUNK = re.compile(r"(.*/|)(\._[^/]*|\.DS_Store|Thumbs\.db|desktop\.ini)|(.*/|)__MACOSX/.*", re.DOTALL | re.IGNORECASE)


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
    for member, name in enumerate(names):
        if (parts := key_and_field(name, key_dot)) is None:
            kind = _kind(name)
            grouping.passed[kind] = grouping.passed.get(kind, 0) + 1
            continue
        key, of_sample = parts
        if key != last:
            last = key
            if key in newest:
                grouping.scattered.append((member, f"sample {key!r} begins a second time: pack the fields of a sample "
                                                   "side by side (tar --sort=name), and give each a key of its own"))
            if key not in newest or of_sample in newest[key]:
                newest[key] = {}
                grouping.samples.append((key, newest[key]))
        if of_sample in newest[key]:
            grouping.repeated.append((member, f"sample {key!r} has field {of_sample!r} twice"))
        newest[key][of_sample] = member
    return grouping


def _kind(name: str) -> str:
    if is_meta(name):
        return "of webdataset itself"
    return "left by a file manager" if _JUNK.fullmatch(name) else "without a field in the name"


def members_of(names: str, fields: dict[str, int]) -> list[int]:
    """The member of the first of the alternatives ("jpg;jpeg") that a sample has. An alternative with a * is all fields
    that match it ("img.*"), 2 before 10."""
    for name in alternatives(names):
        found = sorted(fnmatch.filter(fields, name), key=_by_number) if "*" in name else {name} & fields.keys()
        if found:
            return [fields[each] for each in found]
    return []


def _by_number(field: str) -> list[tuple[int, int, str]]:
    return [(0, int(part), "") if part.isdecimal() else (1, 0, part) for part in re.split(r"([0-9]+)", field)]


def alternatives(names: str) -> list[str]:
    return [name.strip().lower() for name in names.split(";") if name.strip()]
