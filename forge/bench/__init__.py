"""bench: what is measured. An option decides which arms run and what is compared; how turns are taken is shared."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    from forge.bench.session import Session


MOST_STEPS = 1000       # of a turn: phases are kept of so many steps


@dataclass(frozen=True)
class Timing:
    """How turns are taken.

    blocks: undisturbed blocks a comparison rests on. spare: more of them, to take the place of disturbed ones.
    steps: updates of a turn that count, at least; more where they take less than `seconds`, fewer where they would
    take more than seconds_most. settle: updates before them, after the device changed hands. warmup: updates of a new
    arm that never count, at least; what else is warm-up is found by its change of level, within warmup_most.
    patience: seconds that an arm may take to answer. cold: every arm compiles for itself, with caches of its own; else
    it finds what an earlier run of this user left, and its start-up is no start-up.
    """

    blocks: int
    spare: int
    steps: int
    seconds: float
    seconds_most: float
    settle: int
    warmup: int
    warmup_most: int
    patience: float
    cold: bool

    def problems(self) -> Iterator[str]:
        for name, least in (("blocks", 4), ("steps", 1), ("warmup", 1), ("spare", 0), ("settle", 0)):
            if getattr(self, name) < least:
                yield f"bench.timing.{name}={getattr(self, name)}: at least {least} is wanted."
        for name in ("seconds", "seconds_most", "patience"):
            if not getattr(self, name) > 0:
                yield f"bench.timing.{name}={getattr(self, name)}: more than 0 is wanted."
        if self.warmup_most < self.warmup:
            yield (f"bench.timing.warmup_most={self.warmup_most} is less than bench.timing.warmup="
                   f"{self.warmup}: raise it.")

    def steps_of_a_turn(self, step_seconds: float) -> int:
        wanted = max(self.steps, math.ceil(self.seconds / step_seconds))
        return max(1, min(wanted, math.floor(self.seconds_most / step_seconds), MOST_STEPS))


@runtime_checkable
class Bench(Protocol):
    """An option may have `trials(composer)` as well: the configurations it knows of before anything is measured, so
    that what is wrong with one is said first."""

    def __call__(self, session: Session) -> None:
        """Measure, and add what came out to session.record, part by part, so that an interruption leaves the parts
        that are done. Raises ForgeError where nothing can be measured."""
        ...
