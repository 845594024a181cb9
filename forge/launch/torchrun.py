"""Several nodes: freeze the run here, and let torchrun start its workers on each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from forge.errors import Exit

if TYPE_CHECKING:
    from forge.config import Config


@dataclass(frozen=True)
class Torchrun:
    """Starts nothing: prints the line to start on each of `nodes` machines that see the run directory."""

    nodes: int

    def problems(self, config: Config) -> Iterator[str]:
        if self.nodes < 1:
            yield f"launch.nodes={self.nodes}: at least 1 is wanted."
        else:
            yield from config.share_problems(self.nodes * config.hardware.processes)

    def __call__(self, run_dir: Path, config: Config, allowed: tuple[str, ...]) -> Exit:
        permission = f" allowed_packages={','.join(allowed)}" if allowed else ""
        first = "localhost" if self.nodes == 1 else "FIRST_NODE"
        print(f"The run is frozen in {run_dir}. Start it on each of its nodes ({self.nodes}):\n"
              f"torchrun --nnodes={self.nodes} --nproc-per-node={config.hardware.processes} "
              f"--rdzv-backend=c10d --rdzv-endpoint={first}:29500 -m forge.worker {run_dir}{permission}")
        return Exit.ANSWERED
