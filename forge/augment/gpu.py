"""Pictures are changed on the device, after the copy, on the stream that copies."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from forge.augment.recipe import Recipe

if TYPE_CHECKING:
    from forge.batch import Batch


@dataclass(frozen=True)
class OnDevice(Recipe):
    def read(self, batch: Batch) -> Batch:
        return batch

    def __call__(self, batch: Batch) -> Batch:
        """ "pictures" [P, S, S, 3] uint8 become [P, 3, size, size] float32, normalised."""
        from forge.augment.normalised import normalised

        if "pictures" not in batch.tensors:
            return batch
        made = self.augmented(batch.tensors["pictures"], batch.tensors["picture_seeds"])
        return replace(batch, tensors=batch.tensors | {"pictures": normalised(made, self.mean, self.std)})
