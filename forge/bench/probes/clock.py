"""How long one call takes, on a device that works behind the host's back and on one that does not."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

import torch

WARM_CALLS, LEAST_CALLS, MOST_CALLS = 10, 5, 200
CACHE_BYTES = 256 << 20         # more than any GPU's second-level cache: what was written last must not help


@dataclass(frozen=True)
class Times:
    """ms of single calls, in the order they were made."""

    ms: list[float]

    @property
    def median(self) -> float:
        return median(self.ms)

    def record(self) -> dict[str, Any]:
        return {"ms": {"median": median(self.ms), "mean": fmean(self.ms), "least": min(self.ms), "calls": len(self.ms)},
                "samples_ms": self.ms}


@dataclass(frozen=True)
class Clock:
    """seconds: that one figure may take, about; two calls at least are made whatever they take."""

    device: torch.device
    seconds: float

    def times(self, call: Callable[[], Any]) -> Times:
        """Of calls after the first ones. On a GPU by events, each call with a cold cache."""
        begun = time.perf_counter()
        call()
        self.wait()
        for _ in range(min(WARM_CALLS, self._fits(time.perf_counter() - begun))):
            call()
        self.wait()
        begun = time.perf_counter()
        call()
        self.wait()
        num = max(LEAST_CALLS, self._fits(time.perf_counter() - begun))
        if (time.perf_counter() - begun) * LEAST_CALLS > 4 * self.seconds:
            num = 2
        return Times(self._by_events(call, num) if self.device.type == "cuda" else self._by_clock(call, num))

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def _fits(self, seconds_of_a_call: float) -> int:
        return int(min(MOST_CALLS, self.seconds / max(seconds_of_a_call, 1e-9)))

    def _by_clock(self, call: Callable[[], Any], num: int) -> list[float]:
        found = []
        for _ in range(num):
            begun = time.perf_counter_ns()
            call()
            found.append((time.perf_counter_ns() - begun) / 1e6)
        return found

    def _by_events(self, call: Callable[[], Any], num: int) -> list[float]:
        cache = torch.empty(CACHE_BYTES, dtype=torch.int8, device=self.device)
        pairs = []
        for _ in range(num):
            cache.zero_()
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            call()
            end.record()
            pairs.append((begin, end))
        torch.cuda.synchronize()
        return [begin.elapsed_time(end) for begin, end in pairs]
