"""tracker: where the run's figures are shown. A list: any number of trackers at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    from forge.run import Run


class Sink(Protocol):
    """Receives what the ledger read: on the first rank only, and a little later than it happened."""

    def __call__(self, record: dict[str, Any]) -> None: ...

    def result(self) -> dict[str, Any]:
        """After the last record: facts for result.json (such as a path). Not called in a run that fails."""
        ...

    def close(self) -> None:
        """Leave nothing open, neither after result() nor in a run that fails."""
        ...


@runtime_checkable
class Tracker(Protocol):
    def build(self, run: Run) -> Sink: ...


@dataclass(frozen=True)
class Trackers:
    """Every tracker of the run. every: updates between two records, for all of them."""

    every: int
    options: dict[str, Tracker]
