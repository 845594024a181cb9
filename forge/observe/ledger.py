"""The figures of a run: read from the device once for all who show them, and kept in metrics.jsonl."""

from __future__ import annotations

import json
import math
import os
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import torch
from torch import Tensor

from forge.agreement import total
from forge.errors import ForgeError
from forge.hardware import Topology
from forge.observe import Request
from forge.observe.finite import finite
from forge.observe.phases import Phases
from forge.observe.seen import Seen

if TYPE_CHECKING:
    from forge.tracker import Sink
    from forge.trainer import Step

Record = dict[str, Any]


@dataclass(frozen=True)
class Pending:
    """Figures on their way to the host. names and sizes say how `values` is cut."""

    step: int
    lr: float
    names: list[tuple[str, tuple[int, ...]]]
    values: Tensor
    arrived: torch.cuda.Event | None


class Ledger:
    """Observes every `every`-th update, the first and the last.

    Sums go over all ranks. The copy to the host is read when it has arrived, so a record comes out a little later
    than its step, and the device is never waited for before the end.
    origin: says in a sentence where what was not finite in an update arose; all ranks call it.
    """

    def __init__(self, path: Path, every: int, max_skipped: int, topology: Topology, phases: Phases,
                 origin: Callable[[int], str], seen: Seen) -> None:
        self.path, self.every, self.max_skipped, self.origin = path, every, max_skipped, origin
        self.topology, self.phases, self.seen = topology, phases, seen
        self.sinks: list[Sink] = []
        self.targets: Tensor | float = 0.0                  # trained on since the start of this process
        self.targets_before = 0.0                           # and before it, in a run that was resumed
        self.loss_first: float | None = None
        self.loss_last: float | None = None
        self._pending: deque[Pending] = deque()
        self._read_steps, self._last_targets = 0, 0.0
        self._last_step: int | None = None
        self._file: TextIO | None = None
        self._hopeless: Record | None = None                # the first record with more than max_skipped

    def __call__(self, step: Step) -> Request | None:
        if Request.GIVE_UP in step.agreed:
            self._read_all()
        self.targets = self.targets + step.targets.double()
        if self._last_step is None:
            self._last_step = step.number - 1
        if step.number == 1 or step.number % self.every == 0 or step.last:
            self._pending.append(self._fetch(step))
        while self._pending and (self._pending[0].arrived is None or self._pending[0].arrived.query()):
            self._write(self._pending.popleft())
        return Request.GIVE_UP if self._hopeless else None

    def note(self, step: int, **figures: float) -> None:
        """Record figures that are on the host already, such as a held-out loss."""
        self._publish({"step": step, "time": round(time.time(), 3), **figures})

    def result(self) -> dict[str, Any]:
        """Write what is still on its way; the losses of the run, and what the trackers have to say."""
        self._read_all()
        if self._file is not None:
            self._file.close()
        facts: dict[str, Any] = {"tokens": int(self.targets_before + self.targets_here()),
                                 "loss_first": self.loss_first, "loss_last": self.loss_last}
        for sink in self.sinks:
            facts |= sink.result()
        return facts

    def targets_here(self) -> float:
        """Targets trained on by this process's run, over all ranks. Waits for the device."""
        return float(self.targets)

    def state_dict(self) -> dict[str, Any]:
        return {"targets": self.targets_before + self.targets_here(), "loss_first": self.loss_first}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.targets_before, self.loss_first = float(state["targets"]), state["loss_first"]

    def _fetch(self, step: Step) -> Pending:
        outcome = step.outcome
        sums = {name: value.double() for name, value in step.terms.items()}
        summed = total(torch.cat([value.flatten() for value in sums.values()]), self.topology)
        rest = torch.stack([value.double() for value in (step.targets, torch.as_tensor(self.targets), outcome.norm,
                                                         outcome.applied, outcome.skipped)])
        names = [(name, tuple(value.shape)) for name, value in sums.items()]
        values = torch.cat([summed, rest])
        arrived = None
        if values.device.type == "cuda":
            host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            values, arrived = host.copy_(values, non_blocking=True), torch.cuda.Event()
            arrived.record()
        return Pending(step.number, outcome.lr, names, values, arrived)

    def _write(self, pending: Pending) -> None:
        record = self._record(pending)
        self.loss_first = record["loss"] if self.loss_first is None else self.loss_first
        self.loss_last = record["loss"]
        self._publish(record)
        if record["skipped"] > self.max_skipped and self._hopeless is None:
            self._hopeless = record

    def _read_all(self) -> None:
        """Wait for what is on its way. All ranks call it at the same step, so that they give up together."""
        while self._pending:
            pending = self._pending.popleft()
            if pending.arrived is not None:
                pending.arrived.synchronize()
            self._write(pending)
        if self._hopeless is not None:
            skipped, step = self._hopeless["skipped"], self._hopeless["step"]
            raise ForgeError(f"The gradient was not finite in {skipped} updates in a row, up to step {step}, so "
                             f"nothing was learnt in them. {self.origin(step)} Lower optimizer.lr, or look at the "
                             f"data; optimizer.max_skipped={self.max_skipped} is the bound.")

    def _publish(self, record: Record) -> None:
        if self.topology.is_first:
            self._file = self._file or self.path.open("a")
            self._file.write(json.dumps(finite(record)) + "\n")
            self._file.flush()
        for sink in self.sinks:
            sink(record)

    def _record(self, pending: Pending) -> Record:
        figures = pending.values.tolist()
        terms: dict[str, Any] = {}
        for name, shape in pending.names:
            size = math.prod(shape)
            terms[name], figures = figures[:size], figures[size:]
        targets, trained, norm, applied, skipped = figures
        record = {"step": pending.step, "loss": terms["loss_sum"][0] / max(targets, 1.0), "lr": pending.lr,
                  "gradient_norm": norm, "applied": bool(applied), "skipped": int(skipped), "targets": int(targets),
                  "padding_share": self.seen.padding_share, "time": round(time.time(), 3),
                  **self._speed(pending.step, trained)}
        if "aux_loss" in terms:
            record["aux_loss"] = terms["aux_loss"][0] / max(targets, 1.0)
        for name in ("expert_load", "expert_choices"):
            if name in terms:
                record[f"{name}_max_over_mean"] = _imbalance(terms[name], dict(pending.names)[name])
        return record

    def _speed(self, step: int, trained: float) -> Record:
        """Of the steps that ended since the last record; the newest may still be running on the device."""
        fresh = self.phases.read()[self._read_steps:]
        per_step = (trained - self._last_targets) / (step - (self._last_step or 0))
        self._read_steps, self._last_step, self._last_targets = self._read_steps + len(fresh), step, trained
        if not fresh:
            return {"tokens_per_second": None, "step_ms": None}
        mean_ms = sum(fresh) / len(fresh)
        return {"tokens_per_second": per_step / mean_ms * 1e3, "step_ms": mean_ms}


def _imbalance(loads: list[float], shape: tuple[int, ...]) -> float:
    """The fullest expert's load over the mean, of the layer where it is largest."""
    layers, experts = shape
    rows = [loads[layer * experts:(layer + 1) * experts] for layer in range(layers)]
    return max(max(row) * experts / max(sum(row), 1.0) for row in rows)


def drop_after(path: Path, step: int) -> None:
    """Forget what metrics.jsonl records past a snapshot that the run goes on from: it happens again."""
    if path.exists():
        kept = [line for line in path.read_text(errors="replace").splitlines() if _step_of(line) <= step]
        partial = path.with_suffix(".partial")
        partial.write_text("".join(f"{line}\n" for line in kept))
        os.replace(partial, path)


def _step_of(line: str) -> float:
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError, RecursionError):       # a line that a kill cut short
        return math.inf
