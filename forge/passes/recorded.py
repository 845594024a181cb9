"""Recording the passes of a micro-batch into a CUDA graph, and replaying it.

A replay is one launch instead of hundreds: gaps between kernels shrink, and the host is free. What a graph reads and
writes has a fixed place, so batches are copied in, and gradients stay where they were at the recording.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from forge.errors import ConfigError
from forge.notes import say
from forge.passes.turns import Turns, seed

if TYPE_CHECKING:
    from forge.batch import Batch
    from forge.passes import Terms

Shape = tuple[tuple[str, torch.Size], ...]


@dataclass(frozen=True)
class Recording:
    """batch, scale: where a replay reads. terms: where it writes. gradients: and what it leaves in the parameters."""

    graph: torch.cuda.CUDAGraph
    batch: Batch
    scale: Tensor
    terms: Terms
    gradients: list[tuple[nn.Parameter, Tensor]]


@dataclass
class Recorded:
    """See forge.passes.Passes. Two recordings: the first micro-batch of an update writes gradients, the others add."""

    turns: Turns
    warmup: int                         # updates that are still to be taken in turn
    mark: Callable[[str], None]
    recordings: dict[bool, Recording] = field(default_factory=dict)

    def __call__(self, batches: Iterable[Batch], scale: Tensor) -> Terms:
        if self.warmup > 0:
            self.warmup -= 1
            return self.turns(batches, scale)
        terms: Terms = {}
        for index, batch in enumerate(batches):
            self.mark("passes")
            recording = self.recordings.get(index == 0) or self._record(batch, scale, index == 0)
            if _shape(batch) != _shape(recording.batch):
                raise ConfigError("passes=graphed wants batches of one shape, and this one differs from the first: "
                                  "set passes=in_turn.")
            self._replay(recording, batch, scale)
            for name, value in recording.terms.items():
                terms[name] = terms[name] + value if name in terms else value.clone()
        return terms

    def _replay(self, recording: Recording, batch: Batch, scale: Tensor) -> None:
        for name, tensor in batch.tensors.items():
            recording.batch.tensors[name].copy_(tensor)
        recording.scale.copy_(scale)
        seed(self.turns.device, batch.seed)
        recording.graph.replay()
        for parameter, gradient in recording.gradients:
            parameter.grad = gradient

    def _record(self, batch: Batch, scale: Tensor, first: bool) -> Recording:
        """Raises ConfigError where something in the passes cannot be recorded."""
        say("passes=graphed: the passes of a micro-batch are recorded now.")
        held = replace(batch, tensors={name: tensor.clone() for name, tensor in batch.tensors.items()})
        terms: Terms = {}
        graph, scale = torch.cuda.CUDAGraph(), scale.clone()
        silent = replace(self.turns, mark=lambda phase: None, seed=lambda device, number: None)
        parameters = list(self.turns.sync.model.parameters())
        if first:
            torch.cuda.empty_cache()    # what the updates in turn used; the recording has memory of its own
        pool = None if first else self.recordings[True].graph.pool()
        try:
            # thread_local: a loader's thread may pin memory meanwhile.
            with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
                silent.one(held, scale, terms)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise ConfigError(f"passes=graphed: these passes wait for the device or the host somewhere, which a CUDA "
                              f"graph cannot hold ({str(error).splitlines()[0]}). Set passes=in_turn.") from error
        gradients = [(parameter, parameter.grad) for parameter in parameters if parameter.grad is not None]
        self.recordings[first] = Recording(graph, held, scale, terms, gradients)
        return self.recordings[first]


def _shape(batch: Batch) -> Shape:
    return tuple((name, tensor.shape) for name, tensor in batch.tensors.items())
