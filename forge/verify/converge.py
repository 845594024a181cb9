"""verify=converge: do both train to the same end?"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from forge.verify.changes import Kind

if TYPE_CHECKING:
    from forge.verify import Verdict
    from forge.verify.pair import Pair
    from forge.verify.record import Record


@dataclass(frozen=True)
class Converge:
    """Trains both sides from the same weights on the same data, once for each seed, and compares the ends in pairs.

    steps: the schedule's horizon. seeds: trainings of each side. twin: train the baseline once more from weights
    that differ by one rounding: its own noise. tolerance: of the final metrics, relative. batches: of
    the held-out text. smooth: steps that a point of a curve is the mean of. declared: see verify=gradients.
    """

    steps: int
    seeds: int
    twin: bool
    tolerance: float
    batches: int
    smooth: int
    declared: dict[str, Kind]

    def problems(self, config: Any) -> Iterator[str]:
        for name, least in (("steps", 1), ("seeds", 2), ("batches", 1), ("smooth", 1)):
            if getattr(self, name) < least:
                yield f"verify.{name}={getattr(self, name)}: at least {least} is wanted."
        if not self.tolerance > 0:
            yield f"verify.tolerance={self.tolerance}: more than 0 is wanted, for example 0.002."

    def __call__(self, pair: Pair, record: Record) -> Verdict:
        from forge.verify.curves import compare_trainings

        return compare_trainings(self, pair, record)
