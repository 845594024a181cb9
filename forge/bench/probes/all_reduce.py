"""How fast tensors are summed over the ranks, by size."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from forge.bench.probes import Row, missing
from forge.bench.probes.clock import Clock, Times

if TYPE_CHECKING:
    from forge.bench.driver import Driver


def measure(driver: Driver, settings: dict[str, Any]) -> list[Row]:
    """All ranks call it. busbw is algbw * 2 (n - 1) / n, what a ring sends over each link: with other algorithms it can
    be more than a link carries."""
    topology = driver.run.topology
    if topology.world_size == 1:
        return [missing("all sizes", "one process has nobody to sum with (hardware.processes=2).")]
    clock = Clock(topology.device, settings["seconds"])
    return [_row(size, clock, topology.world_size) for size in settings["all_reduce_bytes"]]


def _row(size: int, clock: Clock, ranks: int) -> Row:
    values = torch.zeros(max(1, size // 4), device=clock.device)
    times = Times(_calls(values, clock))
    algorithm = values.numel() * 4 / times.median * 1e3
    bus = algorithm * 2 * (ranks - 1) / ranks
    return {"name": f"{values.numel() * 4:,} bytes", "ranks": ranks, "backend": dist.get_backend(),
            "algorithm_bytes_per_second": algorithm, "bus_bytes_per_second": bus, **times.record(),
            "shown": {"ms": f"{times.median:.4f}", "algbw GB/s": f"{algorithm / 1e9:.3f}",
                      "busbw GB/s": f"{bus / 1e9:.3f}", "backend": f"{dist.get_backend()}, {ranks} ranks"}}


def _calls(values: torch.Tensor, clock: Clock) -> list[float]:
    """ms of single calls, each after a barrier. The ranks agree on how many: each would count otherwise."""
    for _ in range(3):
        dist.all_reduce(values)
    clock.wait()
    begun = time.perf_counter()
    dist.all_reduce(values)
    clock.wait()
    num = torch.tensor([min(100.0, max(5.0, clock.seconds / max(time.perf_counter() - begun, 1e-6)))],
                       device=clock.device)
    dist.all_reduce(num, op=dist.ReduceOp.MIN)
    found = []
    for _ in range(int(num)):
        dist.barrier()
        clock.wait()
        begun = time.perf_counter_ns()
        dist.all_reduce(values)
        clock.wait()
        found.append((time.perf_counter_ns() - begun) / 1e6)
    return found
