"""Nothing is saved: for measurements, whose weights nobody wants."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from forge.observe import Request
    from forge.run import Run
    from forge.trainer import Step


@dataclass(frozen=True)
class NoSnapshot:
    def build(self, run: Run) -> NoSnapshot:
        return self

    def __call__(self, step: Step) -> Request | None:
        return None

    def result(self) -> dict[str, Any]:
        return {"snapshot": None}
