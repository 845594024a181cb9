"""A progress bar on a terminal; plain lines where there is none."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from forge.config import Config
    from forge.run import Run


@dataclass(frozen=True)
class Console:
    """lines_every: seconds between lines where the output is no terminal (a log file)."""

    lines_every: float

    def problems(self, config: Config) -> Iterator[str]:
        if not self.lines_every >= 0:
            yield f"tracker.console.lines_every={self.lines_every}: 0 or more seconds are wanted."

    def build(self, run: Run) -> Bar | Lines:
        return Bar(run) if sys.stderr.isatty() else Lines(run, self.lines_every)


class Bar:
    def __init__(self, run: Run) -> None:
        from rich.console import Console as Terminal
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self.progress = Progress(
            TextColumn("training"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[figures]}"),
            TextColumn("left"), TimeRemainingColumn(elapsed_when_finished=False), console=Terminal(stderr=True))
        self.task = self.progress.add_task("", total=run.config.last_step, completed=run.progress.step, figures="")
        self.progress.start()

    def __call__(self, record: dict[str, Any]) -> None:
        if "loss" in record:
            self.progress.update(self.task, completed=record["step"], figures=_figures(record))

    def result(self) -> dict[str, Any]:
        self.close()            # before anything else is printed
        return {}

    def close(self) -> None:
        self.progress.stop()    # shows the cursor again


class Lines:
    def __init__(self, run: Run, every: float) -> None:
        self.every, self.last = every, run.config.last_step
        self.begun: tuple[float, int] | None = None         # time and step of the first record: it compiled
        self.shown = float("-inf")

    def __call__(self, record: dict[str, Any]) -> None:
        now, step = time.monotonic(), record["step"]
        if "loss" not in record or (now - self.shown < self.every and step != self.last):
            return
        self.shown = now
        print(f"step {step}/{self.last}  {_figures(record)}{self._left(now, step)}", file=sys.stderr, flush=True)

    def _left(self, now: float, step: int) -> str:
        """The time to go, once there are two records to judge by."""
        if self.begun is None:
            self.begun = now, step
            return ""
        begun, first = self.begun
        return f"  {(now - begun) / max(1, step - first) * (self.last - step):.0f} s left"

    def result(self) -> dict[str, Any]:
        return {}

    def close(self) -> None:
        """Nothing is open."""


def _figures(record: dict[str, Any]) -> str:
    speed = record["tokens_per_second"]
    skipped = f"  {record['skipped']} updates skipped" if record["skipped"] else ""
    return f"loss {record['loss']:.4f}" + (f"  {speed:,.0f} tokens/s" if speed else "") + skipped
