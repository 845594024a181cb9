"""Pictures are changed in the process that reads: what augment=gpu does, for comparison and where a GPU has no time."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from forge.augment.recipe import Recipe

if TYPE_CHECKING:
    from forge.batch import Batch


@dataclass(frozen=True)
class InReader(Recipe):
    def read(self, batch: Batch) -> Batch:
        """ "pictures" [P, S, S, 3] uint8 become [P, 3, size, size] uint8: a quarter of what float32 would copy."""
        if "pictures" not in batch.tensors:
            return batch
        made = self.augmented(batch.tensors["pictures"], batch.tensors["picture_seeds"])
        return replace(batch, tensors=batch.tensors | {"pictures": made.mul_(255).round_().byte().contiguous()})

    def __call__(self, batch: Batch) -> Batch:
        """[P, 3, size, size] float32, normalised."""
        from forge.augment.normalised import normalised

        if "pictures" not in batch.tensors:
            return batch
        made = batch.tensors["pictures"].float() / 255
        return replace(batch, tensors=batch.tensors | {"pictures": normalised(made, self.mean, self.std)})
