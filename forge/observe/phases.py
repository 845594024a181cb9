"""Where the time of a step goes, without making anything wait.

Marks are events on the compute stream (on a CPU: readings of the clock), read once the device has passed them. The
phases partition the step: each mark ends the phase before it.
"""

from __future__ import annotations

import time
from array import array
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._C._autograd import _profiler_enabled

FIRST = "data_wait"         # the phase a step begins with
PAUSE = "pause"             # evaluation and snapshots: no part of a step
KEPT = 1024                 # steps whose phases are kept one by one
WARMUP = 3                  # steps left out of the means: they compile, allocate and fill caches
RANGES = {"data_wait": "read"}      # the word of the loop, where the phase has another name


class Phases:
    """Call it with a phase's name: from here on, time belongs to that phase."""

    def __init__(self, device: torch.device) -> None:
        self.on_device = device.type == "cuda"
        self.lengths = array("d")                           # ms of each finished step, without its pauses
        self.totals: dict[str, float] = {}                  # ms of each phase, over the finished steps after WARMUP
        self.newest: deque[dict[str, float]] = deque(maxlen=KEPT)       # ms of each phase, of the newest steps
        self.paused_ms = 0.0
        self._marks: deque[tuple[str, Any]] = deque()
        self._range: Any = None

    def __call__(self, phase: str) -> None:
        self._marks.append((phase, self._now()))
        if _profiler_enabled():              # ranges cost a microsecond only while somebody records
            if self._range is not None:
                self._range.__exit__(None, None, None)
            self._range = torch.profiler.record_function(RANGES.get(phase, phase))
            self._range.__enter__()

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Time in here is not part of a step."""
        self(PAUSE)
        yield
        self("other")

    def read(self, wait: bool = False) -> array[float]:
        """The lengths of all steps whose end the device has passed, in ms. wait: for it to pass all of them."""
        if wait and self.on_device:
            torch.cuda.synchronize()
        while (end := self._next_start()) is not None and self._passed(self._marks[end][1]):
            spent: dict[str, float] = {}
            for _ in range(end):
                phase, begun = self._marks.popleft()
                spent[phase] = spent.get(phase, 0.0) + self._ms(begun, self._marks[0][1])
            self._add(spent)
        return self.lengths

    def rest(self) -> None:
        """End the step here, and wait for the device. What passes until the next mark belongs to no step."""
        self(FIRST)
        self.read(wait=True)
        self._marks.clear()

    def means(self) -> dict[str, float]:
        """ms of each phase in a step, without the first steps."""
        return {phase: ms / max(1, len(self.lengths) - WARMUP) for phase, ms in self.totals.items()}

    def _add(self, spent: dict[str, float]) -> None:
        self.paused_ms += spent.pop(PAUSE, 0.0)
        self.lengths.append(sum(spent.values()))
        self.newest.append(spent)
        if len(self.lengths) > WARMUP:
            for phase, ms in spent.items():
                self.totals[phase] = self.totals.get(phase, 0.0) + ms

    def _next_start(self) -> int | None:
        return next((i for i, (phase, _) in enumerate(self._marks) if i and phase == FIRST), None)

    def _now(self) -> Any:
        if not self.on_device:
            return time.perf_counter_ns()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _passed(self, moment: Any) -> bool:
        return not self.on_device or bool(moment.query())

    def _ms(self, begin: Any, end: Any) -> float:
        return float(begin.elapsed_time(end)) if self.on_device else (end - begin) / 1e6

