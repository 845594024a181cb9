"""The mean loss of a model over a feed, and what must not change while it is taken."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import nn

from forge.agreement import total
from forge.batch import Cursor

if TYPE_CHECKING:
    from forge.batch import Batch
    from forge.feed import Feed
    from forge.hardware import Topology
    from forge.precision import Precision


def mean_loss(model: nn.Module, precision: Precision, feed: Feed, count: int, stage: Callable[[Batch], Batch],
              topology: Topology, progress: bool = False) -> tuple[float, int]:
    """(nats per target, targets) over the first `count` batches of a feed, all ranks together. All ranks call it."""
    sums = torch.zeros(2, dtype=torch.float64, device=topology.device)
    with as_in_evaluation(model):
        for index in _shown(range(min(count, len(feed.plan(0)))), progress):
            for batch in feed[Cursor(0, index)].batches:
                with precision.autocast(topology.device):
                    _, loss_sum, _ = model(stage(batch), torch.ones((), device=topology.device))
                sums[0] += loss_sum
                sums[1] += batch.num_targets
    loss, targets = total(sums, topology).tolist()
    return loss / max(targets, 1.0), int(targets)


def _shown(steps: range, progress: bool) -> Iterable[int]:
    if not progress:
        return steps
    from rich.console import Console
    from rich.progress import track

    return track(steps, "evaluating", console=Console(stderr=True), transient=True)


@contextmanager
def as_in_evaluation(model: nn.Module) -> Iterator[None]:
    """No gradients, no dropout; random state, and the model's mode, are as before afterwards."""
    training = model.training
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    model.eval()
    try:
        with torch.no_grad(), torch.random.fork_rng(devices):
            yield
    finally:
        model.train(training)
