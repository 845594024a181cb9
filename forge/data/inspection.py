"""What shards hold, and what is wrong with them: read only, and without trust in what lies beside them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from forge.data.index import checksum, described, kept_index
from forge.data.naming import samples
from forge.data.storage import Location, opened, status
from forge.data.tar import Fault, Member, walk
from forge.errors import UnreadableError


@dataclass(frozen=True)
class Holding:
    """What some shards hold. sizes: of each field, the bytes it has in each sample that has it."""

    num_shards: int
    num_bytes: int
    num_samples: int
    sizes: dict[str, np.ndarray]


def holding(shards: Sequence[Location]) -> Holding:
    """Reads the headers alone. Raises UnreadableError at the first fault."""
    sizes: dict[str, list[int]] = {}
    num_samples = 0
    for path in shards:
        members = []
        with opened(path) as file:
            for found in walk(file):
                if isinstance(found, Member):
                    members.append(found)
                elif not found.harmless:
                    raise UnreadableError(f"{described(path, found)}. `python -m forge.shards check` lists all faults.")
        grouped = samples([member.name for member in members]).samples
        num_samples += len(grouped)
        for _, fields in grouped:
            for field, member in fields.items():
                sizes.setdefault(field, []).append(members[member].size)
    return Holding(len(shards), sum(status(path)[0] for path in shards), num_samples,
                   {field: np.array(of) for field, of in sorted(sizes.items())})


def faults(path: Location, cache: Path) -> Iterator[Fault]:
    """Everything that is wrong with a shard: its structure, its samples, and, where the shard was indexed, bytes that
    are not those of then."""
    members: list[Member] = []
    checksums: list[int] = []
    cut: Fault | None = None
    with opened(path) as file:
        for found in walk(file):
            if isinstance(found, Member):
                members.append(found)
                checksums.append(checksum(file, found))
            else:
                cut = found if found.offset == file.size else cut
                yield found
    grouping = samples([member.name for member in members])
    for member, why in [*grouping.repeated, *grouping.scattered]:
        yield Fault(members[member].offset, why)
    if cut is not None and (lost := _lost_fields(grouping.samples)):
        yield Fault(cut.offset, f"the last sample, {grouping.samples[-1][0]!r}, lacks {', '.join(lost)}: "
                                "the file was cut")
    yield from _changes(path, cache, members, checksums)


def _lost_fields(grouped: list[tuple[str, dict[str, int]]]) -> list[str]:
    """The fields of all samples but the last."""
    if len(grouped) < 2:
        return []
    counts = Counter(field for _, fields in grouped[:-1] for field in fields)
    return sorted(field for field, count in counts.items()
                  if count == len(grouped) - 1 and field not in grouped[-1][1])


def _changes(path: Location, cache: Path, members: list[Member], checksums: list[int]) -> Iterator[Fault]:
    if (index := kept_index(path, cache)) is None:
        return
    now = {member.offset: (member, value) for member, value in zip(members, checksums, strict=True)}
    for name, offset, size, value in zip(index.names, index.offsets.tolist(), index.sizes.tolist(),
                                         index.checksums.tolist(), strict=True):
        if offset not in now or now[offset][0] != Member(name, offset, size):
            yield Fault(offset, f"member {name!r} was here when the shard was indexed, and is not here now")
        elif now[offset][1] != value:
            yield Fault(offset, f"the {size} bytes of member {name!r} are not those that were indexed")
    for offset in sorted(now.keys() - set(index.offsets.tolist())):
        yield Fault(offset, f"member {now[offset][0].name!r} was not here when the shard was indexed")
