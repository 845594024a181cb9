"""Which members of a shard make its samples, as columns: a million samples are no million objects."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from forge.data.fields import Field, Seen
from forge.data.index import Index
from forge.data.naming import ABSENT, Grouping, KeyDot, Members, samples
from forge.notes import say


class Left(NamedTuple):
    """A sample that was left out, and the byte where it begins."""

    why: str
    offset: int


@dataclass(frozen=True, eq=False)
class Listed:
    """The samples of a shard that have all they must have.

    columns: [samples] int64, the member that is a field of each, or ABSENT. A field that is several members ("img.*")
    is as many columns as any sample has, called "name[0]", "name[1]", ... fields: all that any sample has.
    """

    num_samples: int
    columns: dict[str, np.ndarray]
    fields: list[str]
    left_out: list[Left]


def listed(index: Index, fields: Mapping[str, Field], key_dot: KeyDot) -> Listed:
    """Says what of the shard is no part of a sample."""
    grouping = samples(index.names, key_dot)
    _say_passed(index, grouping)
    members = Members.of(grouping)
    judged = _Judged(members.num_samples)
    twice = np.isin(members.members, [member for member, _ in grouping.repeated])
    judged.refuse("a field that is there twice", members.samples[twice])
    columns: dict[str, np.ndarray] = {}
    for name, field in fields.items():
        of_field = members.of_field(field.names)
        _judge(judged, index, field, of_field)
        if "*" in field.names:
            columns |= {f"{name}[{place}]": column for place, column in enumerate(of_field)}
        else:
            columns[name] = of_field[0]
    kept = judged.whys == 0
    columns = {name: column[kept] for name, column in columns.items()}
    return Listed(int(kept.sum()), {name: column for name, column in columns.items()
                                    if name in fields or (column != ABSENT).any()},
                  members.names, judged.left_out(index, members))


def _judge(judged: _Judged, index: Index, field: Field, columns: list[np.ndarray]) -> None:
    if field.required:
        judged.refuse(f"a missing field {field.names}", np.flatnonzero(columns[0] == ABSENT))
    for column in columns:
        there = np.flatnonzero(column != ABSENT)
        of = column[there]
        seen = Seen(index.sizes[of], index.characters[of], *index.pictures[of].T.astype(np.int64))
        for why, refused in field.refusals(seen):
            judged.refuse(why, there[refused])


class _Judged:
    """whys: [samples] int64, the first reason why each is left out, among `reasons`; 0: it is not."""

    def __init__(self, num_samples: int) -> None:
        self.reasons = [""]
        self.whys = np.zeros(num_samples, np.int64)

    def refuse(self, why: str, which: np.ndarray) -> None:
        """which: numbers of samples."""
        self.whys[which[self.whys[which] == 0]] = len(self.reasons)
        self.reasons.append(why)

    def left_out(self, index: Index, members: Members) -> list[Left]:
        starts = np.full(len(self.whys), np.iinfo(np.int64).max)
        np.minimum.at(starts, members.samples, index.offsets[members.members])
        return [Left(self.reasons[self.whys[sample]], int(starts[sample])) for sample in np.flatnonzero(self.whys)]


def _say_passed(index: Index, grouping: Grouping) -> None:
    if grouping.passed:
        counts = ", ".join(f"{count} {kind}" for kind, count in sorted(grouping.passed.items()))
        say(f"{index.path}: {sum(grouping.passed.values())} members are no part of a sample: {counts}.")
    if grouping.scattered:
        say(f"{index.path}: {len(grouping.scattered)} samples do not lie in one piece, or share a key with others; the "
            "parts of one key are put together.")
