"""What the commands share to look at a run: observers, phases, counters, reports."""

from __future__ import annotations

from enum import Flag, auto
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from forge.trainer import Step


class Request(Flag):
    """What an observer may ask of the run; it happens once all ranks know of it, one update later."""

    NONE = 0
    STOP = auto()
    SNAPSHOT = auto()
    GIVE_UP = auto()        # end with an error, which whoever asks raises once it is agreed


class Observer(Protocol):
    """Looks at finished updates and does not touch them."""

    def __call__(self, step: Step) -> Request | None: ...

    def result(self) -> dict[str, Any]:
        """After the last step: facts for result.json. Closes what is open."""
        ...
