"""The run is saved between two updates, while training waits."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from forge.observe import Request
from forge.snapshot.folder import whole_snapshots

if TYPE_CHECKING:
    from forge.config import Config
    from forge.run import Run
    from forge.trainer import Step


@dataclass(frozen=True)
class Inline:
    """every: updates between snapshots; 0: only at the end, or when stopped. keep: how many stay, the newest."""

    every: int
    keep: int

    def problems(self, config: Config) -> Iterator[str]:
        if self.keep < 1:
            yield f"snapshot.keep={self.keep}: at least 1 is wanted, or snapshot=none."
        if self.every < 0:
            yield f"snapshot.every={self.every}: 0 or more is wanted."

    def build(self, run: Run) -> InlineSaver:
        return InlineSaver(self, run)


class InlineSaver:
    def __init__(self, settings: Inline, run: Run) -> None:
        self.settings, self.run = settings, run
        self.newest: str | None = None

    def __call__(self, step: Step) -> Request | None:
        asked = bool(step.agreed & (Request.SNAPSHOT | Request.STOP))
        due = self.settings.every > 0 and step.number % self.settings.every == 0
        if asked or due or step.last:
            with self.run.phases.pause():
                self._save(step.number)
        return None

    def _save(self, number: int) -> None:
        from forge.snapshot.store import write_snapshot

        run = self.run
        self.newest = str(write_snapshot(run.run_dir, run.state, number, run.identity, run.topology))
        if run.topology.is_first:       # only now, with the new one whole on disk
            for old in whole_snapshots(run.run_dir)[:-self.settings.keep]:
                shutil.rmtree(old)

    def result(self) -> dict[str, Any]:
        return {"snapshot": self.newest}
