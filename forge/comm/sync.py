"""The two ends of data parallelism: a process alone, and one whose gradients meet the others' in buckets."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from forge.parallel.spread import spread_in, spread_of

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
class Slices:
    """Gradients of parameters that are spread meet those of the same slice only, one by one, while backward runs.

    A rank's own is a sum over the tokens that all ranks of the axis sent, so the mean over data ranks is the sum over
    the replicas, divided by all ranks. dtype: to sum in.
    """

    dtype: torch.dtype
    meet: bool = False              # whether this is the last micro-batch of an update
    pending: list[tuple[dist.Work | None, Tensor, Tensor]] = field(default_factory=list)

    def __call__(self, parameter: Tensor) -> None:
        """Once its gradient is whole."""
        spread, gradient = spread_of(parameter), parameter.grad
        if self.meet and spread is not None and gradient is not None:
            sent = gradient.to(self.dtype).div_(dist.get_world_size())
            alone = spread.replicas.size() == 1
            work = None if alone else dist.all_reduce(sent, group=spread.replicas, async_op=True)
            self.pending.append((work, sent, gradient))

    def wait(self) -> None:
        for work, sent, gradient in self.pending:
            if work is not None:
                work.wait()
            if sent is not gradient:
                gradient.copy_(sent)
        self.pending.clear()


@dataclass
class Bucketed(Alone):
    """Gradients are averaged in the last micro-batch of an update, while its backward still runs."""

    model: DistributedDataParallel
    slices: Slices

    def prepare(self, rehearse: Callable[[], None]) -> None:
        """DDP lays its buckets out anew after its first backward, in the order in which gradients came. A resumed run
        would sum its first update in the other layout, which on three and more ranks are other bits."""
        if dist.get_world_size() > 2:
            rehearse()
            self.slices.wait()

    def micro(self, last: bool) -> AbstractContextManager[None]:
        self.slices.meet = last
        return nullcontext() if last else self.model.no_sync()

    def finish(self, step: int) -> None:
        self.slices.wait()


def bucketed(model: nn.Module, precision: Precision, **how: Any) -> Bucketed:
    """Wrap the model. how: arguments of DistributedDataParallel."""
    slices, spread = Slices(getattr(torch, precision.reduce)), spread_in(model)
    for name in spread:
        parameter = model.get_parameter(name)
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(slices)
    ignored = {*getattr(model, "_ddp_params_and_buffers_to_ignore", ()), *spread}
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ignored)
    wrapped = DistributedDataParallel(model, broadcast_buffers=False, **how)
    if precision.reduce != precision.parameter:
        wrapped.register_comm_hook(getattr(torch, precision.reduce), _reduce_in)
    return Bucketed(wrapped, slices)


def _reduce_in(dtype: torch.dtype, bucket: Any) -> Any:
    """A communication hook that sums in another dtype than the gradients'."""
    gradient = bucket.buffer()
    sent = gradient.to(dtype).div_(dist.get_world_size())
    work = dist.all_reduce(sent, async_op=True)
    return work.get_future().then(lambda future: gradient.copy_(future.value()[0]))
