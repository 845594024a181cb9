"""augment: what is changed about a batch on its way into the model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    from forge.batch import Batch


@runtime_checkable
class Augment(Protocol):
    def __call__(self, batch: Batch) -> Batch:
        """A pure function: its randomness comes from `batch.seed`, never from global state."""
        ...
