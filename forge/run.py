"""What observers may look at."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from forge.config import Config
from forge.hardware import Topology
from forge.observe import Observer
from forge.observe.ledger import Ledger
from forge.observe.phases import Phases
from forge.state import Progress, RunState

if TYPE_CHECKING:
    from forge.batch import Batch
    from forge.data import Split
    from forge.feed import Feed


@dataclass(frozen=True)
class Run:
    """model: without the wrappers of comm. stage: copies a batch to the device and augments it.
    open_feed: the feed of a split, for this rank. identity: what a data position depends on."""

    config: Config
    run_dir: Path
    topology: Topology
    model: nn.Module
    state: RunState
    progress: Progress
    phases: Phases
    ledger: Ledger
    stage: Callable[[Batch], Batch]
    open_feed: Callable[[Split, int], Feed]
    identity: dict[str, Any]
    observers: list[Observer] = field(default_factory=list)
