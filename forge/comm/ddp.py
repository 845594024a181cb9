"""Gradients meet in buckets, each reduced as soon as backward has filled it (PyTorch DistributedDataParallel)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn

    from forge.comm.sync import Alone
    from forge.config import Config
    from forge.hardware import Topology
    from forge.precision import Precision


@dataclass(frozen=True)
class DDP:
    """bucket_cap_mb: MiB of gradients in a bucket; larger ones use the network better and overlap less.

    gradient_as_bucket_view: gradients live in the buckets, which saves one copy of them.
    static_graph: promise that every update uses the same parameters, which lets DDP plan once.
    """

    bucket_cap_mb: int
    gradient_as_bucket_view: bool
    static_graph: bool

    def problems(self, config: Config) -> Iterator[str]:
        if self.bucket_cap_mb < 1:
            yield f"comm.bucket_cap_mb={self.bucket_cap_mb}: at least 1 MiB is wanted."
        processes = config.hardware.processes
        if self.static_graph and config.rows_per_pass(processes) * processes < config.global_batch:
            yield ("comm.static_graph=true plans from the first backward, which under accumulation does not "
                   "synchronise: set comm.static_graph=false, or micro_batch=null.")

    def build(self, model: nn.Module, topology: Topology, precision: Precision) -> Alone:
        from forge.comm.sync import Alone, bucketed

        if topology.world_size == 1:
            return Alone(model)
        return bucketed(model, precision, bucket_cap_mb=self.bucket_cap_mb, static_graph=self.static_graph,
                        gradient_as_bucket_view=self.gradient_as_bucket_view)
