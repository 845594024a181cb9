"""A sweep: one run for each value, and one table at the end."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig

from forge.command_line import typed_words
from forge.errors import Exit, ForgeError


@dataclass(frozen=True)
class Point:
    """One run of a sweep: what was varied, how it ended, and its result.json (empty where there is none)."""

    varied: str
    run_dir: Path
    exit_code: Exit
    result: dict[str, Any]


class Sweep:
    """Collects the runs of a sweep. A run that fails is a row of the table, not the end; Ctrl-C is the end."""

    def __init__(self, typed: list[str]) -> None:
        self.typed = typed          # the command line, where what is swept still holds all its values
        self.points: list[Point] = []

    def add(self, run: Callable[[], Exit]) -> None:
        context = HydraConfig.get()
        varied = " ".join(word for word in typed_words() if word not in self.typed)
        run_dir = Path(context.runtime.output_dir)
        print(f"forge: run {context.job.num + 1}: {varied}", file=sys.stderr)
        try:
            code = run()
        except ForgeError as error:
            print(f"forge: {error}", file=sys.stderr)
            code = error.exit_code
        result = run_dir / "result.json"
        self.points.append(Point(varied, run_dir, code, json.loads(result.read_text()) if result.exists() else {}))
        if code in (Exit.INTERRUPTED, Exit.STOPPED):
            self.print_table()
            sys.exit(code)

    def exit_code(self) -> Exit:
        return next((point.exit_code for point in self.points if point.exit_code), Exit.ANSWERED)

    def print_table(self) -> None:
        from rich.console import Console
        from rich.table import Table

        table = Table(title="Sweep", title_justify="left")
        for column in ("", "run", "step ms", "p90", "tokens/s", "loss", "held-out"):
            table.add_column(column, justify="left" if column in ("", "run") else "right", overflow="fold")
        for point in self.points:
            if point.exit_code:
                table.add_row(point.run_dir.name, point.varied, f"ended with exit code {int(point.exit_code)}")
                continue
            step = point.result.get("step_ms") or {}
            table.add_row(point.run_dir.name, point.varied, *(_figure(value, digits) for value, digits in (
                (step.get("median"), 2), (step.get("p90"), 2), (point.result.get("tokens_per_second"), 0),
                (point.result.get("loss_last"), 4), (point.result.get("loss_heldout"), 4))))
        console = Console()
        console.print(table)
        console.print(f"Run directories: {self.points[0].run_dir.parent}", soft_wrap=True)


def _figure(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"
