"""snapshot: when the run is saved, and how many are kept."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    from forge.observe import Observer
    from forge.run import Run


@runtime_checkable
class Snapshot(Protocol):
    def build(self, run: Run) -> Observer: ...
