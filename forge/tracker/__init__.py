"""tracker: where the run's figures are shown. A list: any number of trackers at once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    from forge.observe import Observer
    from forge.run import Run


@runtime_checkable
class Tracker(Protocol):
    every: int              # in updates

    def build(self, run: Run) -> Observer: ...
