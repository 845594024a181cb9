"""Batches reach the model as they were read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from forge.batch import Batch


@dataclass(frozen=True)
class Unchanged:
    def read(self, batch: Batch) -> Batch:
        return batch

    def __call__(self, batch: Batch) -> Batch:
        return batch
