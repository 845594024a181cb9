"""What observers may look at."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from forge.config import Config
from forge.hardware import Topology
from forge.observe import Observer
from forge.observe.ledger import Ledger
from forge.observe.phases import Phases
from forge.observe.seen import Seen
from forge.state import Progress, RunState


@dataclass(frozen=True)
class Run:
    """model: without the wrappers of comm. seen: what this rank was given to train on. identity: what a data
    position depends on."""

    config: Config
    run_dir: Path
    topology: Topology
    model: nn.Module
    state: RunState
    progress: Progress
    phases: Phases
    ledger: Ledger
    seen: Seen
    identity: dict[str, Any]
    observers: list[Observer] = field(default_factory=list)
