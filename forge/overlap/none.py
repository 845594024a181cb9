"""Each batch is staged when it is asked for, and the device waits for it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from forge.batch import Batch, Work
    from forge.overlap import Mark, Stage


@dataclass(frozen=True)
class WhenAsked:
    def __call__(self, works: Iterable[Work], stage: Stage, mark: Mark) -> Iterator[Work]:
        for work in works:
            yield replace(work, batches=_staged(work.batches, stage, mark))


def _staged(batches: Iterable[Batch], stage: Stage, mark: Mark) -> Iterator[Batch]:
    for batch in batches:
        mark("copy")
        yield stage(batch)
