"""One shape of bench=experts: every contender is proven, then all that are right are timed, in turns."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median, quantiles
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from forge.bench.probes import Row, sentence
from forge.bench.probes.clock import CACHE_BYTES
from forge.bench.probes.contenders import Contender, Layer, contender, plain
from forge.bench.probes.proven import Results, allowed, distance, errors, peak_memory, repeats, results, saved_bytes
from forge.bench.statistics import Estimate
from forge.bench.turns import Block, Turn, take_blocks, undisturbed
from forge.config import load
from forge.errors import ForgeError

if TYPE_CHECKING:
    from forge.bench.driver import Driver

MOST_CALLS = 50
PRODUCTS = ("grouped_kernels", "grouped_only")      # of forge's own, the better one first
SKEWED = ", skewed"


def measure(driver: Driver, settings: dict[str, Any], options: dict[str, Path], allowed_: tuple[str, ...]) -> list[Row]:
    """options: of moe_router, name -> run directory whose configuration chooses it."""
    device = driver.run.topology.device
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model: Any = driver.run.config.model
    layer = Layer.drawn(settings["shape"], model.routing, device, dtype)
    proof = Proof(layer, settings, {name: (folder, allowed_) for name, folder in options.items()})
    rows = [proof.row(name) for name in settings["contenders"]]
    proof.forget()
    _time(rows, proof.right, layer, settings)
    return [_with_text(row) for row in rows]


@dataclass
class Proof:
    """right: the contenders that agree with the plain algorithm."""

    layer: Layer
    settings: dict[str, Any]
    options: dict[str, tuple[Path, tuple[str, ...]]]
    right: list[Contender] = field(default_factory=list)
    _plain: dict[str, Results] = field(default_factory=dict)

    def row(self, name: str) -> Row:
        """What is known of a contender before it is timed. One that cannot run is a row with its reason."""
        shown: Row = {"name": name, "status": "measured", "shown": {}}
        if name == "loop" and self.layer.rows > self.settings["loop_rows"]:
            return shown | {"status": "left out", "reason": f"{self.layer.rows} rows are more than bench.loop_rows="
                                                            f"{self.settings['loop_rows']}."}
        try:
            return shown | self._proven(name)
        except torch.OutOfMemoryError as error:
            return shown | {"status": "out of memory", "reason": sentence(error)}
        except Exception as error:      # a contender is anybody's code, and the others are to be measured
            said = str(error) if isinstance(error, ForgeError) else sentence(error)
            return shown | {"status": "failed", "reason": said}
        finally:
            if self.layer.x.device.type == "cuda":
                torch.cuda.empty_cache()

    def _proven(self, name: str) -> Row:
        wait, begun = _waiter(self.layer.x.device), time.perf_counter()
        ours = contender(name, self.layer, self._option(name))
        first = results(ours)
        wait()
        seconds = time.perf_counter() - begun
        found = errors(first, self._reference(ours.kind))
        bound = allowed(self.settings["tolerance"], self.layer.x.dtype, self.layer.rows)
        row: Row = {"kind": ours.kind, "errors": found, "error": max(found.values()), "allowed": bound,
                    "first_call_seconds": seconds, "repeatable": repeats(first, results(ours))}
        del first
        if not row["error"] <= bound:
            name, error = next((name, error) for name, error in found.items() if not error <= bound)
            return row | {"status": "wrong", "reason": f"{name} is {error:.2g} off, and {bound:.2g} is allowed "
                                                       f"(bench.tolerance): not timed."}
        self.right.append(ours)
        return row | {"saved_bytes": saved_bytes(ours), "least_saved_bytes": self.layer.least_saved,
                      "peak_memory_bytes": peak_memory(ours)}

    def _option(self, name: str) -> Any:
        return load(*self.options[name]).moe_router if name in self.options else None

    def _reference(self, kind: str) -> Results:
        if kind not in self._plain:
            self._plain = {kind: results(plain(kind, self.layer))}      # of one kind at a time: they are large
        return self._plain[kind]

    def forget(self) -> None:
        self._plain = {}


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


def _time(rows: list[Row], right: Sequence[Contender], layer: Layer, settings: dict[str, Any]) -> None:
    """Adds to the rows what turns of all contenders say, and of each with balanced and with skewed loads."""
    if not right:
        return
    on_gpu = layer.x.device.type == "cuda"
    flush = torch.empty(CACHE_BYTES, dtype=torch.int8, device=layer.x.device) if on_gpu else None
    sides = [_side(ours, ours.name, flush, settings) for ours in right]
    named = {row["name"]: row for row in rows}
    blocks = undisturbed(_blocks(sides, settings))
    for side in sides:
        named[side.name] |= _timed(side.name, blocks, layer)
    products = next((named[name]["ms"]["median"] for name in PRODUCTS if "ms" in named.get(name, ())), None)
    for row in rows:
        if products is not None and row.get("kind") == "experts" and "ms" in row:
            row["overhead_ms"] = row["ms"]["median"] - products
    if settings["skew"] is not None:
        skewed = layer.skewed(settings["skew"])
        wanted = _output(plain("experts", layer), skewed.float())
        for side in sides:
            if side.contender.kind == "experts":
                named[side.name]["skewed"] = _skewed(side, skewed, wanted, settings, layer)


def _side(ours: Contender, name: str, flush: Tensor | None, settings: dict[str, Any]) -> Side:
    once = Side(ours, name, settings["calls"], flush)
    once.turn()
    ms = median(once.turn().lengths)
    return replace(once, calls=max(settings["calls"], min(MOST_CALLS, math.ceil(settings["seconds"] * 1e3 / ms))))


def _blocks(sides: Sequence[Side], settings: dict[str, Any]) -> list[Block]:
    return take_blocks(sides, settings["blocks"], settings["spare"], lambda number, name: None)


def _timed(name: str, blocks: list[Block], layer: Layer) -> Row:
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
            "over_dense": _times(name, "dense", blocks) if "dense" in there else None,
            "over_sorted": _times(name, "sorted", blocks) if "sorted" in there else None}


def _times(name: str, other: str, blocks: list[Block]) -> dict[str, float | None]:
    """How many times as long as the other it takes, with a 95 % interval over blocks."""
    found = Estimate.of([block.log_ratio(other, name) for block in blocks])
    low, high = (None if end is None else math.exp(end) for end in (found.low, found.high))
    return {"estimate": math.exp(found.mean), "low": low, "high": high}


def _skewed(side: Side, x: Tensor, wanted: Tensor, settings: dict[str, Any], layer: Layer) -> Row:
    """error: of the output, against the plain algorithm's, `wanted`. times: as long as with balanced loads."""
    bound = allowed(settings["tolerance"], layer.x.dtype, layer.rows)
    error = distance(_output(side.contender, x), wanted, float(wanted.norm()))
    if not error <= bound:
        return {"error": error, "reason": f"with skewed loads it is {error:.2g} off: not timed."}
    other = _side(replace(side.contender, x=x), side.name + SKEWED, side.flush, settings)
    blocks = undisturbed(_blocks([side, other], settings))
    return {"error": error, "times": _times(other.name, side.name, blocks) if blocks else None}


def _output(ours: Contender, x: Tensor) -> Tensor:
    with torch.no_grad():
        return ours.forward(x)


def _waiter(device: torch.device) -> Any:
    return torch.cuda.synchronize if device.type == "cuda" else lambda: None


def _with_text(row: Row) -> Row:
    """`shown`: what the table says of it."""
    ratio, skewed = _ratio_of(row, "over_dense"), (row.get("skewed") or {}).get("times")
    ms = row.get("ms")
    cells = {"ms": ms and f"{ms['median']:.3f} [{ms['p10']:.3f}, {ms['p90']:.3f}]",
             "forward": _number(row.get("forward_ms"), 3), "over dense": ratio,
             "over sorted": _ratio_of(row, "over_sorted"), "overhead ms": _number(row.get("overhead_ms"), 3),
             "TFLOP/s": _number(row.get("tflops"), 1), "skewed": skewed and f"{skewed['estimate']:.2f} x",
             "first call s": _number(row.get("first_call_seconds"), 1),
             "saved MiB": _number(row.get("saved_bytes"), 1, 2**20),
             "of least": _number(row.get("saved_bytes"), 2, row.get("least_saved_bytes") or 1),
             "peak GB": _number(row.get("peak_memory_bytes"), 2, 1e9),
             "error": f"{row['error']:.1e}" if "error" in row else None,
             "repeats": {True: "yes", False: "no"}.get(row.get("repeatable"))}     # type: ignore[arg-type]
    text = {name: cell for name, cell in cells.items() if cell is not None}
    return row | {"shown": text if row["status"] == "measured" else {"ms": row["status"], **text}}


def _ratio_of(row: Row, name: str) -> str | None:
    found = row.get(name)
    if found is None:
        return None
    bounds = "" if found["low"] is None else f" [{found['low']:.2f}, {found['high']:.2f}]"
    return f"{found['estimate']:.2f}{bounds}"


def _number(value: float | None, digits: int, unit: float = 1.0) -> str | None:
    return None if value is None else f"{value / unit:,.{digits}f}"
