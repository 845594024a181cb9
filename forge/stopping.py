"""A run that is asked to stop by a signal finishes its update, saves, and says with its exit code why it ended."""

from __future__ import annotations

import signal
from types import FrameType
from typing import TYPE_CHECKING, Any

from forge.errors import Exit
from forge.observe import Request

if TYPE_CHECKING:
    from forge.trainer import Step

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


def heeded() -> list[signal.Signals]:
    """The signals that ask for a stop: SIGHUP does not where it is ignored already, for then nohup asked for that."""
    return [number for number in SIGNALS
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN]


class Stopping:
    """Observes the signals that ask for a stop. Slurm sends SIGTERM or SIGUSR1 before it takes a node back.

    One that comes before the first update lets the run do its first ones and save: exit codes 75 and 130 promise
    something to go on from.
    """

    def __init__(self) -> None:
        self.received: int | None = None

    @classmethod
    def listening(cls) -> Stopping:
        """From now on, these signals ask for a stop and no longer end the process. The launcher starts its workers
        with the signals blocked, so that none is lost before this; here they are let in."""
        stopping = cls()
        for number in heeded():
            signal.signal(number, stopping._receive)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        return stopping

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self.received = self.received or number

    def __call__(self, step: Step) -> Request | None:
        return Request.STOP if self.received else None

    @property
    def exit_code(self) -> Exit:
        return Exit.INTERRUPTED if self.received == signal.SIGINT else Exit.STOPPED

    def result(self) -> dict[str, Any]:
        return {}
