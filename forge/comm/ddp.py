"""Gradients meet in buckets, each reduced as soon as backward has filled it (PyTorch DistributedDataParallel)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

if TYPE_CHECKING:
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

    def build(self, model: nn.Module, topology: Topology, precision: Precision) -> Alone | Bucketed:
        if topology.world_size == 1:
            return Alone(model)
        wrapped = DistributedDataParallel(
            model, bucket_cap_mb=self.bucket_cap_mb, gradient_as_bucket_view=self.gradient_as_bucket_view,
            static_graph=self.static_graph, broadcast_buffers=False)
        reduce = getattr(torch, precision.reduce)
        if reduce is not getattr(torch, precision.parameter):
            wrapped.register_comm_hook(reduce, _reduce_in)
        return Bucketed(wrapped)


@dataclass
class Alone:
    """One process: its gradients are the mean already."""

    model: nn.Module

    def micro(self, last: bool) -> AbstractContextManager[None]:
        return nullcontext()

    def finish(self, step: int) -> None:
        """Nothing is pending."""

    def state_dict(self) -> dict[str, Tensor]:
        return {}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Nothing was saved."""


@dataclass
class Bucketed(Alone):
    """Gradients are averaged in the last micro-batch of an update, while its backward still runs."""

    model: DistributedDataParallel

    def micro(self, last: bool) -> AbstractContextManager[None]:
        return nullcontext() if last else self.model.no_sync()


def _reduce_in(dtype: torch.dtype, bucket: Any) -> Any:
    """A communication hook that sums in another dtype than the gradients'."""
    gradient = bucket.buffer()
    sent = gradient.to(dtype).div_(dist.get_world_size())
    work = dist.all_reduce(sent, async_op=True)
    return work.get_future().then(lambda future: gradient.copy_(future.value()[0]))

