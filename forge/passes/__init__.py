"""passes: in which order the forward and backward passes of one update run."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from forge.batch import Batch
    from forge.comm import Sync
    from forge.precision import Precision

Terms = dict[str, Any]      # "loss_sum" and the model's own terms, summed over this rank's micro-batches


class Passes(Protocol):
    def __call__(self, batches: Iterable[Batch], scale: Tensor) -> Terms:
        """Every forward and backward of one update; gradients are left in the parameters."""
        ...


@runtime_checkable
class PassOrder(Protocol):
    def build(self, sync: Sync, precision: Precision, device: torch.device, mark: Callable[[str], None]) -> Passes: ...
