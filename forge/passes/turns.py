"""The passes of one update, one micro-batch after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from forge.batch import Batch
    from forge.comm import Sync
    from forge.passes import Terms
    from forge.precision import Precision


def seed(device: torch.device, number: int) -> None:
    """Seed what the model draws from. torch.manual_seed would also queue a call, with its stack, for each kind of
    device that is not there, and keep it for ever."""
    torch.default_generator.manual_seed(number)
    if device.type == "cuda":
        torch.cuda.manual_seed(number)


@dataclass(frozen=True)
class Turns:
    sync: Sync
    precision: Precision
    device: torch.device
    mark: Callable[[str], None]
    seed: Callable[[torch.device, int], None] = seed

    def __call__(self, batches: Iterable[Batch], scale: Tensor) -> Terms:
        terms: Terms = {}
        upcoming = iter(batches)
        batch = next(upcoming, None)
        while batch is not None:
            following = next(upcoming, None)        # asked for first, since gradients meet in the last
            with self.sync.micro(last=following is None):
                self.one(batch, scale, terms)
            batch = following
        return terms

    def one(self, batch: Batch, scale: Tensor, terms: Terms) -> None:
        """Forward and backward of one micro-batch, whose terms are added to `terms`."""
        self.mark("forward")
        self.seed(self.device, batch.seed)          # what the model draws depends on the position in the data only
        with self.precision.autocast(self.device):
            scaled, loss_sum, more = self.sync.model(batch, scale)
        self.mark("backward")
        scaled.backward()
        for name, value in {"loss_sum": loss_sum, **more}.items():
            terms[name] = terms[name] + value if name in terms else value
