"""What it costs to start work: below this, a step is bound by the host and not by the device."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from forge.bench.probes import Row, missing
from forge.bench.probes.clock import Clock

if TYPE_CHECKING:
    from forge.bench.driver import Driver

CALLS, ROUNDS = 500, 15         # fewer than the device queues, so that launches do not wait for it


def measure(driver: Driver, settings: dict[str, Any]) -> list[Row]:
    clock = Clock(driver.run.topology.device, settings["seconds"])
    number = torch.zeros(1, device=clock.device)
    what = "a kernel of one number" if clock.device.type == "cuda" else "an operator on one number"

    def nothing() -> None:
        pass

    rows = [_row("a Python call", _each(nothing, clock)), _row(what, _each(lambda: number.add_(1), clock))]
    if clock.device.type != "cuda":
        return [*rows, missing("a kernel in a CUDA graph", "there are CUDA graphs on GPUs only.")]
    replay = _graph(number)
    return [*rows, _row("a kernel in a CUDA graph", [us / CALLS for us in _each(replay, clock, 20, waited=True)])]


def _graph(number: torch.Tensor) -> Callable[[], Any]:
    number.add_(1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            number.add_(1)
    return graph.replay


def _each(call: Callable[[], Any], clock: Clock, calls: int = CALLS, waited: bool = False) -> list[float]:
    """us of a call, in each of some rounds: what the host spends, or, waited, what passes until the device is done."""
    found = []
    for _ in range(ROUNDS + 1):
        clock.wait()
        begun = time.perf_counter_ns()
        for _ in range(calls):
            call()
        if waited:
            clock.wait()
        found.append((time.perf_counter_ns() - begun) / calls / 1e3)
    return found[1:]


def _row(name: str, us: list[float]) -> Row:
    middle = sorted(us)[len(us) // 2]
    return {"name": name, "us": middle, "samples_us": us, "shown": {"us": f"{middle:.3f}"}}
