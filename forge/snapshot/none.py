"""Nothing is saved: for measurements, whose weights nobody wants."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from forge.notes import say
from forge.observe import Request

if TYPE_CHECKING:
    from forge.run import Run
    from forge.trainer import Step


@dataclass(frozen=True)
class NoSnapshot:
    def build(self, run: Run) -> NoSnapshot:
        return self

    def __call__(self, step: Step) -> Request | None:
        if Request.STOP in step.agreed:
            say("snapshot=none: the run stops, and nothing of it is saved.")
        return None

    def result(self) -> dict[str, Any]:
        return {"snapshot": None}
