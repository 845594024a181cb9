"""The end of a run: result.json, report.md, and a summary for the person at the terminal."""

from __future__ import annotations

import json
import os
import resource
from pathlib import Path
from typing import Any

import numpy as np
import torch

from forge.agreement import total
from forge.observe import Observer
from forge.observe.finite import finite
from forge.observe.flops import utilisation
from forge.observe.origin import processor, versions
from forge.observe.phases import WARMUP
from forge.observe.summary import UTILISATION, print_summary, write_report
from forge.run import Run

PHASES = ("data_wait", "copy", "forward", "backward", "exposed_comm", "optimizer", "idle", "other")


def conclude(run: Run, observers: list[Observer], status: str) -> None:
    """Collect the facts of the run, write them, and show them. All ranks call it."""
    run.phases("data_wait")                                 # ends the last step
    measured = _speed(run) | _padding(run)
    facts: dict[str, Any] = {}
    for observer in observers:
        facts |= observer.result()
    if run.topology.is_first:
        result = {"status": status, "steps": run.progress.step, **measured, **facts, **_memory(run), **_place(run)}
        _write(run.run_dir / "result.json", result)
        write_report(run.run_dir / "report.md", result, run.config)
        print_summary(result, run.run_dir)


def _speed(run: Run) -> dict[str, Any]:
    lengths = np.array(run.phases.read(wait=True))
    steady = lengths[WARMUP:] if len(lengths) > WARMUP else lengths
    facts: dict[str, Any] = {"tokens_per_second": None, "step_ms": None, "phases_ms": dict.fromkeys(PHASES),
                             **dict.fromkeys(UTILISATION), "pause_seconds": run.phases.paused_ms / 1e3}
    if not len(steady):
        return facts
    rate = run.ledger.targets_here() / len(lengths) / steady.mean() * 1e3
    return facts | {"tokens_per_second": float(rate), "phases_ms": facts["phases_ms"] | run.phases.means(),
                    "step_ms": {"median": float(np.median(steady)), "p90": float(np.quantile(steady, 0.9)),
                                "mean": float(steady.mean())},
                    **utilisation(run, float(rate))}


def _padding(run: Run) -> dict[str, Any]:
    sums = torch.tensor([run.seen.padding, run.seen.tokens], dtype=torch.int64, device=run.topology.device)
    padding, computed = total(sums, run.topology).tolist()
    return {"padding_share": padding / computed if computed else None}


def _memory(run: Run) -> dict[str, Any]:
    if run.topology.device.type == "cuda":
        return {"peak_memory_bytes": torch.cuda.max_memory_allocated()}
    return {"peak_memory_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}


def _place(run: Run) -> dict[str, Any]:
    device = run.topology.device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else processor()
    return {"device": {"type": device.type, "name": name, "count": run.topology.world_size},
            "versions": versions(), "choices": run.config.choices}


def _write(path: Path, result: dict[str, Any]) -> None:
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(finite(result), indent=1) + "\n")
    os.replace(partial, path)
