"""How long contenders of bench=experts take, in turns that mirror each other."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median, quantiles
from typing import Any

import torch
from torch import Tensor

from forge.bench.probes import Row
from forge.bench.probes.contenders import Contender, Layer
from forge.bench.statistics import Estimate
from forge.bench.turns import Block, Turn, take_blocks

MOST_CALLS = 50


@dataclass
class Side:
    """A contender in turns: see forge.bench.turns.Turn, with a call for a step."""

    contender: Contender
    name: str
    calls: int
    flush: Tensor | None

    def turn(self) -> Turn:
        from forge.bench.driver import counters

        before, begun = counters(), time.perf_counter()
        timed = [self._call() for _ in range(self.calls + 1)][1:]       # the first finds the clocks of another
        if self.flush is not None:
            torch.cuda.synchronize()
        forward = [_between(times[0], times[1]) for times in timed]
        both = [_between(times[0], times[2]) for times in timed]
        # Rates are of layers, not of rows: some contenders begin with sorted ones, top_k a token.
        return Turn(lengths=both, settling=[], tokens=float(self.calls),
                    phases={"forward": sum(forward), "backward": sum(both) - sum(forward)},
                    wall_seconds=time.perf_counter() - begun, peak_memory=None,
                    disturbances=[f"{now - before[name]:g} {name}" for name, now in counters().items()
                                  if now > before[name]])

    def _call(self) -> list[Any]:
        """The moments before forward, between, and after backward. The second-level cache is emptied before: between
        two layers of a model, the rest of it passes through."""
        x = self.contender.x.detach().requires_grad_()
        if self.flush is not None:
            self.flush.zero_()
        times = [_now(self.flush is not None)]
        y = self.contender.forward(x)
        times.append(_now(self.flush is not None))
        torch.autograd.grad(y, [x, *self.contender.weights.values()], self.contender.gradient)
        return [*times, _now(self.flush is not None)]


def _now(on_gpu: bool) -> Any:
    if not on_gpu:
        return time.perf_counter_ns()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _between(begin: Any, end: Any) -> float:
    """ms."""
    return (end - begin) / 1e6 if isinstance(begin, int) else float(begin.elapsed_time(end))


def side_of(ours: Contender, name: str, flush: Tensor | None, settings: dict[str, Any]) -> Side:
    once = Side(ours, name, settings["calls"], flush)
    once.turn()
    ms = median(once.turn().lengths)
    return replace(once, calls=max(settings["calls"], min(MOST_CALLS, math.ceil(settings["seconds"] * 1e3 / ms))))


def blocks_of(sides: Sequence[Side], settings: dict[str, Any]) -> list[Block]:
    return take_blocks(sides, settings["blocks"], settings["spare"], lambda number, name: None)


def timed(name: str, blocks: list[Block], layer: Layer) -> Row:
    """Empty where every block was disturbed."""
    turns = [turn for block in blocks for other, turn in zip(block.order, block.turns, strict=True) if other == name]
    calls = [ms for turn in turns for ms in turn.lengths]
    if not calls:
        return {"status": "disturbed"}
    tenths = quantiles(calls, n=10, method="inclusive") if len(calls) > 1 else calls * 9
    middle = median(calls)
    there = blocks[0].order
    return {"ms": {"median": middle, "p10": tenths[0], "p90": tenths[-1], "calls": len(calls)},
            "forward_ms": median(turn.phases["forward"] / len(turn.lengths) for turn in turns),
            "tflops": layer.flops / middle / 1e9, "samples_ms": [turn.lengths for turn in turns],
            "over_dense": times(name, "dense", blocks) if "dense" in there else None,
            "over_sorted": times(name, "sorted", blocks) if "sorted" in there else None}


def times(name: str, other: str, blocks: list[Block]) -> dict[str, float | None]:
    """How many times as long as the other it takes, with a 95 % interval over blocks."""
    found = Estimate.of([block.log_ratio(other, name) for block in blocks])
    low, high = (None if end is None else math.exp(end) for end in (found.low, found.high))
    return {"estimate": math.exp(found.mean), "low": low, "high": high}
