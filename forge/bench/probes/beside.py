"""Ways to do the same work on the host, in turns that mirror each other."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median, quantiles

from forge.bench.probes import Row
from forge.bench.statistics import Estimate
from forge.bench.turns import Block, Turn, take_blocks

LEAST_BLOCKS, MOST_BLOCKS = 4, 20


@dataclass(frozen=True)
class Way:
    """work: does all of it once, and gives how much that was (bytes, pictures)."""

    name: str
    work: Callable[[], float]

    def turn(self) -> Turn:
        begun = time.perf_counter()
        done = self.work()
        seconds = time.perf_counter() - begun
        return Turn(lengths=[seconds * 1e3], settling=[], tokens=done, phases={}, wall_seconds=seconds,
                    peak_memory=None, disturbances=[])


def beside(ways: Mapping[str, Callable[[], float]], seconds: float) -> list[Block]:
    """Blocks of turns, as many as fit into about `seconds` for each way. What comes first, caches and imports, is
    dropped."""
    sides = [Way(name, work) for name, work in ways.items()]
    for side in sides:
        side.turn()
    once = sum(side.turn().wall_seconds for side in sides)
    blocks = int(seconds * len(sides) / (2 * once))
    return take_blocks(sides, max(LEAST_BLOCKS, min(MOST_BLOCKS, blocks)), 0, lambda number, name: None)


def rates(blocks: Sequence[Block], per: str, unit: str, scale: float, over: str) -> list[Row]:
    """A row for each way: its rate under `per`, median and tenths over turns, and how many times that of `over`."""
    return [_row(name, blocks, per, unit, scale, over) for name in dict.fromkeys(blocks[0].order)]


def _row(name: str, blocks: Sequence[Block], per: str, unit: str, scale: float, over: str) -> Row:
    turns = [turn for block in blocks for other, turn in zip(block.order, block.turns, strict=True) if other == name]
    each = [turn.rate for turn in turns]
    tenths = quantiles(each, n=10, method="inclusive")
    times = Estimate.of([block.log_ratio(name, over) for block in blocks])
    low, high = (None if end is None else math.exp(end) for end in (times.low, times.high))
    shown = {unit: f"{median(each) / scale:,.2f}", "spread": f"{tenths[0] / scale:,.2f} to {tenths[-1] / scale:,.2f}"}
    if name != over:
        shown[f"times {over}"] = f"{math.exp(times.mean):.2f}" + ("" if low is None else f" ({low:.2f} to {high:.2f})")
    return {"name": name, per: median(each), "p10": tenths[0], "p90": tenths[-1], "samples": each,
            f"over_{over}": None if name == over else {"estimate": math.exp(times.mean), "low": low, "high": high},
            "shown": shown}
