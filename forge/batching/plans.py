"""The plans of epochs, each made once in a process: when it is asked for, or ahead of that in a thread."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from forge.batching import Plan

    Make = Callable[[int], Plan]        # of an epoch: a pure function

_KEPT = 3       # the epoch before, this one and the next
_PATIENCE = 2.0 # seconds that closing waits: what a run ends with must not be the plan of an epoch that never comes


class Plans:
    """Asked by one thread of a process. One that could not be made ahead is made when it is asked for, and fails there
    as it does without a thread."""

    def __init__(self, make: Make) -> None:
        self._make = make
        self._made: dict[int, Plan] = {}        # the one that was asked for last comes last
        self._ahead: _Ahead | None = None

    def __getitem__(self, epoch: int) -> Plan:
        """Raises what `make` does."""
        if epoch not in self._made and self._ahead is not None and self._ahead.epoch == epoch:
            self._ahead.join()          # in a process that was forked meanwhile the thread has ended, without a plan
            if self._ahead.plan is not None:
                self._made[epoch] = self._ahead.plan
            self._ahead = None
        plan = self._made.pop(epoch) if epoch in self._made else self._make(epoch)
        self._made[epoch] = plan
        if len(self._made) > _KEPT:
            del self._made[next(iter(self._made))]
        return plan

    def prepare(self, epoch: int) -> None:
        """Begin to make a plan. Takes no time."""
        if epoch in self._made or (self._ahead is not None and (self._ahead.epoch == epoch or self._ahead.is_alive())):
            return
        self._ahead = _Ahead(self._make, epoch)
        self._ahead.start()

    def close(self) -> None:
        """No thread is left, but for a plan that takes long: it ends with the process."""
        if self._ahead is not None:
            self._ahead.join(_PATIENCE)


class _Ahead(threading.Thread):
    """plan: None where it could not be made, or not yet."""

    def __init__(self, make: Make, epoch: int) -> None:
        super().__init__(name="planner", daemon=True)
        self._make_plan, self.epoch = make, epoch
        self.plan: Plan | None = None

    def run(self) -> None:
        with suppress(Exception):       # told when the plan is asked for
            self.plan = self._make_plan(self.epoch)
