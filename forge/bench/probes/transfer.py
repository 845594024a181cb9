"""How fast bytes cross between host and device: from pinned memory, which the device reads by itself, and from
pageable memory, which the driver copies first."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from forge.bench.probes import Row, missing
from forge.bench.probes.clock import Clock

if TYPE_CHECKING:
    from forge.bench.driver import Driver


def measure(driver: Driver, settings: dict[str, Any]) -> list[Row]:
    device = driver.run.topology.device
    if device.type != "cuda":
        return [missing("host to device", "this arm computes on the host, so nothing crosses.")]
    clock = Clock(device, settings["seconds"])
    rows = []
    for megabytes in settings["copy_mb"]:
        there = torch.zeros(megabytes * 1_000_000, dtype=torch.int8, device=device)
        for kind in ("pinned", "pageable"):
            here = torch.zeros(there.numel(), dtype=torch.int8, pin_memory=kind == "pinned")
            for way, source, goal in (("host to device", here, there), ("device to host", there, here)):
                rows.append(_row(f"{way}, {kind}, {megabytes} MB", source, goal, clock))
    return rows


def _row(name: str, source: torch.Tensor, goal: torch.Tensor, clock: Clock) -> Row:
    times = clock.times(lambda: goal.copy_(source, non_blocking=True))
    rate = source.numel() / times.median * 1e3
    return {"name": name, "bytes_per_second": rate, **times.record(),
            "shown": {"GB/s": f"{rate / 1e9:.2f}", "ms": f"{times.median:.4f}"}}
