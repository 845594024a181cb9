"""Batches cross to the device while the one before is computed, on a CUDA stream of their own."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from forge.batch import Work
    from forge.config import Config
    from forge.overlap import Mark, Stage


@dataclass(frozen=True)
class Prefetch:
    """depth: micro-batches that are staged ahead of the one handed out, over the edges of updates."""

    depth: int

    def problems(self, config: Config) -> Iterator[str]:
        if self.depth < 1:
            yield f"overlap.depth={self.depth}: at least 1 is wanted; overlap=none stages nothing ahead."

    def __call__(self, works: Iterable[Work], stage: Stage, mark: Mark) -> Iterator[Work]:
        from forge.overlap.ahead import Ahead
        from forge.overlap.lane import lane

        return Ahead(iter(works), lane(stage, mark), self.depth).works()
