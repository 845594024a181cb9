"""The two ends of data parallelism: a process alone, and one whose gradients meet the others' in buckets."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

if TYPE_CHECKING:
    from forge.precision import Precision


@dataclass
class Alone:
    """One process: its gradients are the mean already."""

    model: nn.Module

    def prepare(self, rehearse: Callable[[], None]) -> None:
        """Nothing depends on what came before."""

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

    def prepare(self, rehearse: Callable[[], None]) -> None:
        """DDP lays its buckets out anew after its first backward, in the order in which gradients came. A resumed run
        would sum its first update in the other layout, which on three and more ranks are other bits."""
        if dist.get_world_size() > 2:
            rehearse()

    def micro(self, last: bool) -> AbstractContextManager[None]:
        return nullcontext() if last else self.model.no_sync()


def bucketed(model: nn.Module, precision: Precision, **how: Any) -> Bucketed:
    """Wrap the model. how: arguments of DistributedDataParallel."""
    wrapped = DistributedDataParallel(model, broadcast_buffers=False, **how)
    if precision.reduce != precision.parameter:
        wrapped.register_comm_hook(getattr(torch, precision.reduce), _reduce_in)
    return Bucketed(wrapped)


def _reduce_in(dtype: torch.dtype, bucket: Any) -> Any:
    """A communication hook that sums in another dtype than the gradients'."""
    gradient = bucket.buffer()
    sent = gradient.to(dtype).div_(dist.get_world_size())
    work = dist.all_reduce(sent, async_op=True)
    return work.get_future().then(lambda future: gradient.copy_(future.value()[0]))

