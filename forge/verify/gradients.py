"""verify=gradients: do loss and gradients agree, from the same weights and the same rows?"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from forge.verify.changes import Kind
from forge.verify.rule import Few

if TYPE_CHECKING:
    from forge.verify import Verdict
    from forge.verify.pair import Pair
    from forge.verify.record import Record


@dataclass(frozen=True)
class Gradients:
    """rows: of an update, at least. updates: how many; in every second one the gates of experts are zero, so they tie.

    most_micro_batches: an update is cut into at most so many.
    multiplier, multiplier_half: of the baseline's error, in float32 and in shorter formats; few: exceptions for small
        tensors.
    largest_baseline_error: of all gradients, in units of the format's eps.
    update_roundings: by how many eps of float32 two optimizers may differ. factors: what the gradients that they are
        fed are multiplied by, update by update.
    plain: group -> option -> the option that takes its place in the float64 reference.
    declared: setting or pattern -> what it is meant to change; the first that matches decides, and what matches none
        changes nothing. rounding: the number format; update: what the optimizer does with gradients; start: the
        weights a run begins with; maths: anything.
    """

    rows: int
    updates: int
    most_micro_batches: int
    multiplier: float
    multiplier_half: float
    few: list[Few]
    largest_baseline_error: float
    update_roundings: float
    factors: list[float]
    plain: dict[str, dict[str, str]]
    declared: dict[str, Kind]

    def problems(self, config: Any) -> Iterator[str]:
        for name, least in (("rows", 1), ("updates", 1), ("most_micro_batches", 2)):
            if getattr(self, name) < least:
                yield f"verify.{name}={getattr(self, name)}: at least {least} is wanted."
        for name in ("multiplier", "multiplier_half"):
            if getattr(self, name) < 1:
                yield f"verify.{name}={getattr(self, name)}: at least 1 is wanted: the baseline itself has that error."
        for name in ("largest_baseline_error", "update_roundings"):
            if getattr(self, name) <= 0:
                yield f"verify.{name}={getattr(self, name)}: more than 0 is wanted."
        if not self.factors:
            yield "verify.factors=[]: at least one update is wanted, for example [1.0]."

    def __call__(self, pair: Pair, record: Record) -> Verdict:
        from forge.verify.examine import Examination

        return Examination(self, pair, record)()
