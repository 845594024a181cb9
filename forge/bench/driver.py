"""The real trainer, driven turn by turn."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from forge.observe.phases import Phases

if TYPE_CHECKING:
    from forge.run import Run
    from forge.trainer import Trainer

ENDLESS = 10**12


class Silent(Phases):
    """Marks that are not set. A run that is measured turns into this and back, so that no run has to ask for each
    mark whether it is wanted."""

    def __call__(self, phase: str) -> None:
        pass


class Driver:
    """Takes updates when it is told to. Between turns nothing runs, and no step's length grows."""

    def __init__(self, trainer: Trainer, run: Run) -> None:
        self.trainer, self.run = trainer, run
        self._updates = trainer.steps(ENDLESS)

    def turn(self, settle: int, steps: int) -> dict[str, Any]:
        """`settle` updates that do not count, then `steps` that do; the fields of forge.bench.turns.Turn."""
        before, disturbed, begun = len(self.run.phases.lengths), counters(), time.perf_counter()
        self._take(settle)
        tokens = self._take(steps)
        self.run.phases.rest()
        lengths = list(self.run.phases.lengths[before:])
        phases: dict[str, float] = {}
        for spent in list(self.run.phases.newest)[-steps:]:
            for phase, ms in spent.items():
                phases[phase] = phases.get(phase, 0.0) + ms
        return {"lengths": lengths[settle:], "settling": lengths[:settle], "tokens": float(tokens), "phases": phases,
                "wall_seconds": time.perf_counter() - begun, "peak_memory": self._peak_memory(),
                "disturbances": [f"{now - disturbed[name]:g} {name}" for name, now in counters().items()
                                 if now > disturbed[name]]}

    def untold(self, settle: int, steps: int, telemetry: bool) -> dict[str, Any]:
        """A turn by the clock alone, with or without the marks, the ledger and the trackers."""
        with self._marked(telemetry):
            self._take(settle, telemetry)
            self._wait()
            begun = time.perf_counter()
            tokens = self._take(steps, telemetry)
            self._wait()
            seconds = time.perf_counter() - begun
            if telemetry:
                self.run.phases.rest()
        return {"lengths": [seconds / steps * 1e3] * steps, "settling": [], "tokens": float(tokens), "phases": {},
                "wall_seconds": seconds, "peak_memory": self._peak_memory(), "disturbances": []}

    def _take(self, steps: int, observed: bool = True) -> Any:
        """The targets of so many updates, summed where they are."""
        tokens: Any = 0.0
        for _ in range(steps):
            step = next(self._updates)
            tokens = tokens + step.targets
            for observe in self.run.observers if observed else ():
                self.trainer.ask(observe(step))
        return tokens

    @contextmanager
    def _marked(self, telemetry: bool) -> Iterator[None]:
        self.run.phases.__class__ = Phases if telemetry else Silent
        try:
            yield
        finally:
            self.run.phases.__class__ = Phases

    def _wait(self) -> None:
        if self.run.topology.device.type == "cuda":
            torch.cuda.synchronize()

    def _peak_memory(self) -> int:
        if self.run.topology.device.type == "cuda":
            return int(torch.cuda.max_memory_allocated())
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def counters() -> dict[str, float]:
    """What makes a turn say nothing, counted since the process began."""
    counted = {"recompilations": 0.0, "allocations that had to be retried": 0.0}
    if "torch._dynamo.utils" in sys.modules:
        counted["recompilations"] = float(sys.modules["torch._dynamo.utils"].counters["stats"]["unique_graphs"])
    if torch.cuda.is_initialized():
        counted["allocations that had to be retried"] = float(torch.cuda.memory_stats().get("num_alloc_retries", 0))
    return counted
