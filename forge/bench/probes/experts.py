"""One shape of bench=experts: every contender is proven, then all that are right are timed, in turns."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from forge.bench.probes import Row, sentence
from forge.bench.probes.clock import CACHE_BYTES
from forge.bench.probes.contenders import LEANING, Contender, Layer, contender, plain
from forge.bench.probes.floor import Rates, backward, forward
from forge.bench.probes.proven import Results, allowed, errors, peak_memory, repeats, results, saved_bytes
from forge.bench.probes.timed import Side, blocks_of, side_of, timed, times
from forge.bench.turns import undisturbed
from forge.config import load
from forge.errors import ForgeError

if TYPE_CHECKING:
    from forge.bench.driver import Driver

PRODUCTS = ("grouped_kernels", "grouped_only")      # of forge's own, the better one first
CHANGES = ("skewed", "losses")      # see Change


def measure(driver: Driver, settings: dict[str, Any], options: dict[str, Path], allowed_: tuple[str, ...]) -> list[Row]:
    """options: of moe_router, name -> run directory whose configuration chooses it."""
    device = driver.run.topology.device
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model: Any = driver.run.config.model
    layer = Layer.drawn(settings["shape"], model.routing, device, dtype, getattr(torch, settings["gate"]))
    floor = _floor(layer, settings)     # before the contenders take memory
    proof = Proof(layer, settings, {name: (folder, allowed_) for name, folder in options.items()})
    rows = [proof.row(name) for name in settings["contenders"]]
    proof.forget()
    _time(rows, proof)
    return [floor, *(_with_text(row | _over(floor, row)) for row in rows)]


def _floor(layer: Layer, settings: dict[str, Any]) -> Row:
    """A row of its own, whose reason says at which rates."""
    rates = Rates.measured(layer.x.device, layer.x.dtype, settings)
    if isinstance(rates, str):
        return {"name": "floor", "status": "failed", "shown": {}, "reason": rates}
    there, back = rates.ms(forward(layer)), rates.ms(backward(layer))
    return {"name": "floor", "kind": "floor", "status": "measured", "floor_ms": there + back, "forward_ms": there,
            "rates": asdict(rates), "shown": {"ms": f"{there + back:.3f}", "forward": f"{there:.3f}"},
            "reason": f"each launch by its products at {rates.flops_per_second / 1e12:.4g} TFLOP/s (a product of "
                      f"{rates.square_size} rows and columns) or its bytes at {rates.bytes_per_second / 1e9:.4g} GB/s "
                      f"(a copy of {rates.copy_mb} MB), both measured here."}


def _over(floor: Row, row: Row) -> Row:
    there = "floor_ms" in floor and row.get("kind") == "experts" and "ms" in row
    return {"over_floor": row["ms"]["median"] / floor["floor_ms"]} if there else {}


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
        ours = contender(name, self.layer, self.option(name))
        first = results(ours)
        wait()
        seconds = time.perf_counter() - begun
        found = errors(first, self._reference(ours.kind))
        bound = self.allowed()
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

    def allowed(self, magnified: float = 1.0) -> float:
        """magnified: what becomes of a rounding of float32."""
        return allowed(self.settings["tolerance"], self.layer.coarsest, self.layer.rows * magnified**2)

    def option(self, name: str) -> Any:
        return load(*self.options[name]).moe_router if name in self.options else None

    def _reference(self, kind: str) -> Results:
        if kind not in self._plain:
            self._plain = {kind: results(plain(kind, self.layer))}      # of one kind at a time: they are large
        return self._plain[kind]

    def forget(self) -> None:
        self._plain = {}


@dataclass(frozen=True)
class Change:
    """What is asked of contenders beside the plain layer, to see what it costs them.

    name: of the column. layer: what is computed then. asked: of a contender, the one that computes it, or None where it
    cannot. gradient: of the output, with which it is proven. magnified: see Proof.allowed.
    """

    name: str
    layer: Layer
    asked: Callable[[Contender], Contender | None]
    gradient: Tensor
    magnified: float = 1.0


def _changes(proof: Proof) -> Iterator[Change]:
    layer, settings = proof.layer, proof.settings
    if settings["skew"] is not None:
        skewed = replace(layer, x=layer.skewed(settings["skew"]))
        # The gradient of a weight that is nearly 1 is a difference, which magnifies roundings up to exp(LEANING) times:
        # in a norm over tokens that lie between, the root of that.
        yield Change("skewed", skewed, lambda ours: replace(ours, x=skewed.x), layer.gradient, math.exp(LEANING / 2))
    if settings["aux_loss"] > 0 or settings["z_loss"] > 0:
        routing = replace(layer.routing, aux_loss=settings["aux_loss"], z_loss=settings["z_loss"])
        lossy = replace(layer, routing=routing)
        # Beside the gradient of the output that of the losses is too small to be missed.
        yield Change("losses", lossy, lambda ours: contender(ours.name, lossy, proof.option(ours.name))
                     if ours.routed else None, torch.zeros_like(layer.gradient))


def _time(rows: list[Row], proof: Proof) -> None:
    """Adds to the rows what turns of all contenders say, and what each change costs them."""
    layer, settings = proof.layer, proof.settings
    if not proof.right:
        return
    on_gpu = layer.x.device.type == "cuda"
    flush = torch.empty(CACHE_BYTES, dtype=torch.int8, device=layer.x.device) if on_gpu else None
    sides = [side_of(ours, ours.name, flush, settings) for ours in proof.right]
    named = {row["name"]: row for row in rows}
    blocks = undisturbed(blocks_of(sides, settings))
    for side in sides:
        named[side.name] |= timed(side.name, blocks, layer)
    products = next((named[name]["ms"]["median"] for name in PRODUCTS if "ms" in named.get(name, ())), None)
    for row in rows:
        if products is not None and row.get("kind") == "experts" and "ms" in row:
            row["overhead_ms"] = row["ms"]["median"] - products
    experts = [side for side in sides if side.contender.kind == "experts"]
    for change in _changes(proof) if experts else ():
        wanted = results(replace(plain("experts", change.layer), gradient=change.gradient.float()))
        for side in experts:
            cost = _cost(change, side, wanted, proof)
            if cost is not None:
                named[side.name][change.name] = cost


def _cost(change: Change, side: Side, wanted: Results, proof: Proof) -> Row | None:
    """error: of output and gradients, the largest. times: as long as without the change."""
    try:
        asked = change.asked(side.contender)
        if asked is None:
            return None
        found = errors(results(replace(asked, gradient=change.gradient)), wanted)
        worst = max(found, key=lambda name: found[name])
        bound = proof.allowed(change.magnified)
        row: Row = {"error": found[worst], "errors": found}
        if not found[worst] <= bound:
            return row | {"reason": f"{change.name}: {worst} is {found[worst]:.2g} off, and {bound:.2g} is allowed "
                                    f"(bench.tolerance): not timed."}
        other = side_of(asked, f"{side.name}, {change.name}", side.flush, proof.settings)
    except Exception as error:      # as in Proof.row
        return {"reason": f"{change.name}: {sentence(error)}"}
    blocks = undisturbed(blocks_of([side, other], proof.settings))
    return row | {"times": times(other.name, side.name, blocks) if blocks else None}


def _waiter(device: torch.device) -> Any:
    return torch.cuda.synchronize if device.type == "cuda" else lambda: None


def _with_text(row: Row) -> Row:
    """`shown`: what the table says of it."""
    changed = {name: (row.get(name) or {}).get("times") for name in CHANGES}
    ms = row.get("ms")
    cells = {"ms": ms and f"{ms['median']:.3f} [{ms['p10']:.3f}, {ms['p90']:.3f}]",
             "forward": _number(row.get("forward_ms"), 3), "over dense": _ratio_of(row, "over_dense"),
             "over sorted": _ratio_of(row, "over_sorted"), "over floor": _number(row.get("over_floor"), 2),
             "overhead ms": _number(row.get("overhead_ms"), 3),
             "TFLOP/s": _number(row.get("tflops"), 1),
             **{name: times and f"{times['estimate']:.2f} x" for name, times in changed.items()},
             "first call s": _number(row.get("first_call_seconds"), 1),
             "saved MiB": _number(row.get("saved_bytes"), 1, 2**20),
             "of least": _number(row.get("saved_bytes"), 2, row.get("least_saved_bytes") or 1),
             "peak GB": _number(row.get("peak_memory_bytes"), 2, 1e9),
             "error": f"{row['error']:.1e}" if "error" in row else None,
             "repeats": {True: "yes", False: "no"}.get(row.get("repeatable"))}     # type: ignore[arg-type]
    text = {name: cell for name, cell in cells.items() if cell is not None}
    said = [row[name]["reason"] for name in CHANGES if "reason" in row.get(name, ())]
    if said:
        row = row | {"reason": " ".join(filter(None, [row.get("reason"), *said]))}
    return row | {"shown": text if row["status"] == "measured" else {"ms": row["status"], **text}}


def _ratio_of(row: Row, name: str) -> str | None:
    found = row.get(name)
    if found is None:
        return None
    bounds = "" if found["low"] is None else f" [{found['low']:.2f}, {found['high']:.2f}]"
    return f"{found['estimate']:.2f}{bounds}"


def _number(value: float | None, digits: int, unit: float = 1.0) -> str | None:
    return None if value is None else f"{value / unit:,.{digits}f}"
