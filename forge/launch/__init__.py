"""launch: who starts the workers of a frozen run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    from forge.config import Config
    from forge.errors import Exit


@runtime_checkable
class Launch(Protocol):
    def __call__(self, run_dir: Path, config: Config, allowed: tuple[str, ...]) -> Exit:
        """Run the workers of run_dir/config.yaml to their end."""
        ...
