"""dataloader=webdataset: worker processes read ahead."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from forge.dataloader import Reader
from forge.errors import ConfigError

if TYPE_CHECKING:
    from forge.config import Config
    from forge.feed import Feed
    from forge.hardware import Topology

_MOST = 16              # workers for each core: those that wait for slow storage need none meanwhile


@dataclass(frozen=True)
class Workers:
    """Each worker reads whole updates, every one the next in turn; what is read does not depend on how many there are.

    workers: processes of each rank; 0: read in the rank's own process; None: core_fraction of the cores that this
        machine's ranks may use, shared among them.
    prefetch_factor: updates that each worker reads ahead.
    persistent: workers live on when reading begins anew elsewhere.
    pin_memory: copy what was read to page-locked memory, from which a GPU copies by itself. Without CUDA, nothing.
    """

    workers: int | None
    core_fraction: float
    prefetch_factor: int
    persistent: bool
    pin_memory: bool

    def build(self, feed: Feed, topology: Topology) -> Reader:
        from forge.dataloader.workers import FromWorkers  # here, because it imports torch

        return FromWorkers(feed, self._num_workers(topology), self.prefetch_factor, self.persistent,
                           self.pin_memory and topology.device.type == "cuda")

    def problems(self, config: Config) -> Iterator[str]:
        if self.workers is not None and self.workers < 0:
            yield f"dataloader.workers={self.workers} is negative: set it to 0 or more, or to null"
        if not 0 < self.core_fraction <= 1:
            yield f"dataloader.core_fraction={self.core_fraction} is no fraction: set it to 0.5, for example"
        if self.prefetch_factor < 1:
            yield f"dataloader.prefetch_factor={self.prefetch_factor}: a worker reads at least 1 update ahead"

    def _num_workers(self, topology: Topology) -> int:
        """Raises ConfigError for more than this machine can have a use for, which may not be where the line was
        checked."""
        cores = len(os.sched_getaffinity(0))
        if self.workers is not None:
            if self.workers > _MOST * cores:
                raise ConfigError(f"dataloader.workers={self.workers} on {cores} cores holds memory and reads nothing "
                                  f"sooner: set it to {_MOST * cores} or less, or to null.")
            return self.workers
        ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", topology.world_size))
        return max(1, int(cores * self.core_fraction / ranks_here))
