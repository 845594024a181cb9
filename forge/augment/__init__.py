"""augment: what is changed about a batch on its way into the model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    from forge.batch import Batch


@runtime_checkable
class Augment(Protocol):
    """Both are pure functions of the batch: what is random comes from its "picture_seeds" or its `seed`, never from
    global state. Neither is asked in evaluation."""

    def read(self, batch: Batch) -> Batch:
        """In the process that reads, before the copy to the device."""
        ...

    def __call__(self, batch: Batch) -> Batch:
        """On the device, after the copy."""
        ...
