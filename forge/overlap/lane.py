"""The way to the device: where batches are staged, and how the model's computation and the copies keep apart."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Protocol

import torch

from forge.notes import say

if TYPE_CHECKING:
    from forge.batch import Batch
    from forge.overlap import Mark, Stage

Arrival = Callable[[], "Batch"]         # the staged batch, safe to use by whoever calls


class Lane(Protocol):
    def send(self, batch: Batch) -> Arrival: ...


def lane(stage: Stage, mark: Mark) -> Lane:
    """Beside the model's stream where there is a GPU in use; otherwise in line with everything else."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        return Beside(stage, mark, side_stream(torch.cuda.current_device()))
    say("overlap=prefetch: without a GPU there is nothing to copy to. Batches are staged ahead, which gains no time.")
    return InLine(stage, mark)


@cache
def side_stream(device: int) -> torch.cuda.Stream:
    """One a device for as long as the process lives: a new one for each epoch or evaluation would each get, and keep,
    memory of its own from PyTorch's allocator."""
    return torch.cuda.Stream(device)


@dataclass(frozen=True)
class InLine:
    stage: Stage
    mark: Mark

    def send(self, batch: Batch) -> Arrival:
        self.mark("copy")
        staged = self.stage(batch)
        return lambda: staged


@dataclass(frozen=True)
class Beside:
    """Staged tensors are memory of the side stream. It is given out again only to the side stream, as soon as Python
    lets go of it, and the model's stream may still have to read it: so the side stream first waits for all that the
    model's stream was asked to do so far."""

    stage: Stage
    mark: Mark
    stream: torch.cuda.Stream

    def send(self, batch: Batch) -> Arrival:
        self.mark("copy")
        self.stream.wait_event(torch.cuda.current_stream().record_event())
        with torch.cuda.stream(self.stream):
            staged = self.stage(batch.pin_memory())         # only pinned memory is copied without the host waiting
            copied = self.stream.record_event()

        def arrive() -> Batch:
            torch.cuda.current_stream().wait_event(copied)
            return staged

        return arrive
