"""Every attention option at the shapes of this model, and the kernels that really ran."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from forge.attention import Attention, Layout
from forge.bench.probes import Row, missing, sentence
from forge.bench.probes.clock import Clock
from forge.config import Config, load
from forge.errors import ForgeError

if TYPE_CHECKING:
    from forge.bench.driver import Driver
    from forge.run import Run

NAMED = 3       # kernels of a row: forward, backward, and what prepares it


def measure(driver: Driver, settings: dict[str, Any], options: dict[str, Path], allowed: tuple[str, ...]) -> list[Row]:
    """options: name -> run directory whose configuration chooses it."""
    run = driver.run
    model: Any = run.config.model
    if not all(hasattr(model, name) for name in ("heads", "kv_heads", "head_width")):
        return [missing("shapes of this model", "this model does not say how wide its heads are.")]
    inputs = _inputs(run, model)
    clock = Clock(run.topology.device, settings["seconds"])
    rows = []
    for name, folder in options.items():
        for dropout in settings["dropouts"]:
            title = f"{name}, dropout {dropout:g}"
            try:
                config = load(folder, allowed)
                row = _row(title, config.attention, inputs, dropout, clock, run)
                rows.append(_refused(row, config, dropout))
            except (RuntimeError, ForgeError, ImportError, ValueError) as error:
                rows.append(missing(title, sentence(error)))
    return _with_best(rows)


def _refused(row: Row, config: Config, dropout: float) -> Row:
    """Says beside a time that a run would not take it: a kernel may round the dropout, or leave it out."""
    model: Any = config.model
    problems: Any = getattr(config.attention, "problems", lambda config: [])
    said = next(iter(problems(replace(config, model=replace(model, dropout=dropout)))), None)
    if said is not None:
        row["refused"] = said
        row["shown"]["kernels"] += " (a run refuses this)"
    return row


def _with_best(rows: list[Row]) -> list[Row]:
    best = min((row["ms"]["median"] for row in rows if "ms" in row), default=None)
    for row in rows:
        if "ms" in row and best is not None:
            row["of_best"] = best / row["ms"]["median"]
    return rows


def _inputs(run: Run, model: Any) -> tuple[Tensor, ...]:
    """q, k, v, and the gradient of the result, in the dtype that this run attends in."""
    device = run.topology.device
    rows, length = run.config.rows_per_pass(run.topology.data_size), run.config.sequence_length
    with run.config.precision.autocast(device):
        dtype = torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else \
            next(run.model.parameters()).dtype
    return tuple(torch.randn(rows, heads, length, model.head_width, device=device).to(dtype).requires_grad_(number < 3)
                 for number, heads in enumerate((model.heads, model.kv_heads, model.kv_heads, model.heads)))


def _row(title: str, option: Attention, inputs: tuple[Tensor, ...], dropout: float, clock: Clock, run: Run) -> Row:
    q, k, v, gradient = inputs
    plan = option.plan(Layout(True, None, getattr(run.config.model, "window", None), q.shape[2], q.device))

    def forward() -> Tensor:
        return option(q, k, v, plan, dropout)

    def both() -> None:
        torch.autograd.grad(forward(), (q, k, v), gradient)

    with torch.no_grad():
        alone = clock.times(forward)
    times, kernels = clock.times(both), kernels_of(both, clock)
    return {"name": title, "dtype": str(q.dtype), "shape": list(q.shape), "forward_ms": alone.median,
            "kernels": kernels, **times.record(),
            "shown": {"forward ms": f"{alone.median:.3f}", "with backward": f"{times.median:.3f}",
                      "kernels": ", ".join(map(short, kernels[:NAMED]))}}


def kernels_of(call: Any, clock: Clock) -> list[str]:
    """What took the time, largest first: kernels on a GPU, PyTorch's operators on a CPU."""
    on_gpu = clock.device.type == "cuda"
    with profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]) as seen:
        call()
        clock.wait()
    events = [(event.key, event.self_device_time_total if on_gpu else event.self_cpu_time_total)
              for event in seen.key_averages() if not on_gpu or event.device_type.name == "CUDA"]
    return [name for name, spent in sorted(events, key=lambda one: -one[1]) if spent > 0][:8]


def short(kernel: str) -> str:
    """A kernel's own name, without namespaces and template arguments."""
    bare = re.split(r"[<(]", kernel.removeprefix("void "), maxsplit=1)[0] or kernel
    return bare.split("::")[-1][:60]
