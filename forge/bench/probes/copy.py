"""How fast memory is copied within the device. Bytes count twice: they are read and written."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from forge.bench.probes import Row, missing, sentence
from forge.bench.probes.clock import Clock

if TYPE_CHECKING:
    from forge.bench.driver import Driver


def measure(driver: Driver, settings: dict[str, Any]) -> list[Row]:
    clock = Clock(driver.run.topology.device, settings["seconds"])
    return [copied(megabytes, clock) for megabytes in settings["copy_mb"]]


def copied(megabytes: int, clock: Clock) -> Row:
    """bytes_per_second of a copy of so much, or the reason why there is none."""
    name = f"{megabytes} MB"
    try:
        source = torch.zeros(megabytes * 1_000_000, dtype=torch.int8, device=clock.device)
        goal = torch.empty_like(source)
        times = clock.times(lambda: goal.copy_(source))
    except RuntimeError as error:
        return missing(name, sentence(error))
    rate = 2 * source.numel() / times.median * 1e3
    return {"name": name, "bytes_per_second": rate, **times.record(),
            "shown": {"GB/s": f"{rate / 1e9:.1f}", "ms": f"{times.median:.4f}"}}
