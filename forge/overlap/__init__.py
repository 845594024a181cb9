"""overlap: when batches cross to the device, relative to the step that is being computed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    from forge.batch import Batch, Work

    Stage = Callable[[Batch], Batch]        # copy to the device, then augment
    Mark = Callable[[str], None]            # from here on, time belongs to this phase


@runtime_checkable
class Overlap(Protocol):
    def __call__(self, works: Iterable[Work], stage: Stage, mark: Mark) -> Iterator[Work]:
        """The same work in the same order, its batches staged. Decides when; never what comes out."""
        ...
