"""The baseline against itself: how large a difference has to be here to mean anything."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from forge.bench import Timing

if TYPE_CHECKING:
    from forge.bench.session import Session


@dataclass(frozen=True)
class AA:
    """max_floor: the largest floor, as a gain, with which anything is judged. micro: a record of bench=micro, whose
    matmul rate MFU is given against as well; null: only against the datasheet."""

    max_floor: float
    micro: str | None
    timing: Timing

    def problems(self) -> Iterator[str]:
        yield from self.timing.problems()
        yield from floor_problems(self.max_floor)

    def __call__(self, session: Session) -> None:
        from forge.bench.compare import Judge, find_floor, note_smallest
        from forge.bench.session import BASELINE, matmul_rate

        judge = Judge(self.timing, self.max_floor, matmul_rate(self.micro))
        first, again = session.composer.trial(BASELINE), session.composer.trial("baseline again")
        session.progress.measure(1)
        find_floor(session, judge, session.baseline(first, self.timing), again)
        note_smallest(session, judge)


def floor_problems(max_floor: float) -> Iterator[str]:
    if not max_floor > 0:
        yield f"bench.max_floor={max_floor}: more than 0 is wanted, for example 0.02 for two per cent."
