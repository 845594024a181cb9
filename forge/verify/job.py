"""What a side is asked to measure: written by the command, read by the processes that do it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

JOBS = "jobs.json"


@dataclass(frozen=True)
class Job:
    """name: of the folder with what was found. what: gradients of the first updates, what the optimizer makes of given
    gradients, or a whole training.

    precision: own: the configuration's; given: that of `given`, its values with their _target_, of a package in
        `allowed`.
    rows, micro_batch: of an update. weights: the file that all sides start from; the first job that finds none writes
        its own. plain: group -> option, in place of the configuration's.
    trace: note what each module gives. watch: groups whose options note which of their methods are called.
    gradients, factors: what the optimizer is fed. seed, steps, batches: of a training.
    nudge: its first weights are all moved by one rounding.
    """

    name: str
    what: Literal["gradients", "update", "training"]
    precision: Literal["own", "given", "float32", "float64"] = "own"
    given: dict[str, Any] = field(default_factory=dict)
    allowed: tuple[str, ...] = ()
    rows: int = 0
    micro_batch: int = 0
    updates: int = 0
    weights: str = ""
    plain: dict[str, str] = field(default_factory=dict)
    trace: bool = False
    watch: list[str] = field(default_factory=list)
    gradients: str = ""
    factors: list[float] = field(default_factory=list)
    nudge: bool = False
    seed: int = 0
    steps: int = 0
    batches: int = 0


def write_jobs(folder: Path, jobs: list[Job]) -> None:
    (folder / JOBS).write_text(json.dumps([asdict(job) for job in jobs]))


def read_jobs(folder: Path) -> list[Job]:
    return [Job(**job) for job in json.loads((folder / JOBS).read_text())]


def found(folder: Path, job: str) -> dict[str, Any]:
    """The figures a job left."""
    figures: dict[str, Any] = json.loads((folder / job / "figures.json").read_text())
    return figures
