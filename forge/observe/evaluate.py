"""How good a model is on a split: what evaluation in a run and forge.evaluate share."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from forge.agreement import total
from forge.batch import IGNORED, Batch
from forge.errors import ConfigError

if TYPE_CHECKING:
    from forge.batching import Plan
    from forge.config import Config
    from forge.data import Source, Split
    from forge.hardware import Topology

Share = tuple[list[int], int]       # rows of one batch, and the row that takes their place where there are none
_AT_ONCE = 512                      # targets whose logits exist at the same time


@dataclass(frozen=True)
class Judge:
    """The mean loss over the rows of a split, all of them or the first, always the same ones.

    Rows are shared by the ranks, `rows` at a time; only the last batch of a rank may be shorter.
    """

    config: Config
    topology: Topology
    source: Source
    plan: Plan
    rows: int

    @classmethod
    def of(cls, config: Config, topology: Topology, split: Split) -> Judge:
        """Raises ConfigError where the split is shorter than one row."""
        source = config.data.open(split)
        try:
            plan = config.batching.plan(source, config.seed, epoch=0, global_batch=1)
        except ConfigError:         # it speaks of training
            raise ConfigError(f"The {split} split has {int(source.lengths.sum()):,} tokens, less than one row: lower "
                              f"sequence_length={config.sequence_length}, or set evaluation=none.") from None
        return cls(config, topology, source, plan, config.rows_per_pass(topology.data_size))

    def mean_loss(self, model: nn.Module, batches: int | None, progress: bool = False) -> tuple[float, int]:
        """(nats per target, targets) over at most so many batches of every rank. All ranks call it."""
        device = self.topology.device
        sums = torch.zeros(2, dtype=torch.float64, device=device)
        with as_in_evaluation(model):
            for batch in self.batches(batches, progress):
                with self.config.precision.autocast(device):
                    _, loss_sum, _ = model(batch.to(device), torch.ones((), device=device))
                sums[0] += loss_sum
                sums[1] += batch.num_targets
        loss, targets = total(sums, self.topology).tolist()
        return loss / max(targets, 1.0), int(targets)

    def by_target(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        """(nats, missed), each [targets of the batch] float64 in row-major order. missed: 1 where another token is
        likelier.

        In one pass, and with the logits of a few targets at a time, whatever the loss option keeps.
        """
        trainable: Any = model
        device = self.topology.device
        batch = batch.to(device)
        targets = batch.tensors["targets"]
        wanted = targets[targets != IGNORED]
        nats, missed = torch.zeros(2, len(wanted), dtype=torch.float64, device=device)
        with self.config.precision.autocast(device):
            hidden = trainable.hidden_states(batch)[targets != IGNORED]
            for first in range(0, len(wanted), _AT_ONCE):
                some = slice(first, first + _AT_ONCE)
                logits = trainable.logits_of(hidden[some])
                nats[some] = F.cross_entropy(logits, wanted[some], reduction="none")
                missed[some] = logits.argmax(-1) != wanted[some]
        return nats, missed

    def batches(self, most: int | None, progress: bool = False) -> Iterator[Batch]:
        """This rank's, on the host: as many as every rank's, since a model may be spread over them. A rank whose rows
        are used up passes one that does not count."""
        return (self._batch(*share) for share in _shown(self._shares(most), progress))

    def _shares(self, most: int | None) -> list[Share]:
        """The rows of this rank, cut into batches of one kind, where the plan knows several."""
        together = self.topology.data_size * self.rows
        count = len(self.plan) if most is None else min(len(self.plan), most * together)
        kinds = np.asarray(getattr(self.plan, "kinds", np.zeros(len(self.plan), np.int64)))[:count]
        members = [np.flatnonzero(kinds == kind).tolist() for kind in np.unique(kinds)]
        return [(alike[first:first + together][self.topology.data_rank::self.topology.data_size], alike[0])
                for alike in members for first in range(0, len(alike), together)]

    def _batch(self, indices: list[int], instead: int) -> Batch:
        tensors = self.config.batching.collate([self.plan[index][0] for index in indices or [instead]], self.source)
        if not indices:
            tensors["targets"] = torch.full_like(tensors["targets"], IGNORED)      # which may be a view of the tokens
        return Batch(tensors, int((tensors["targets"] != IGNORED).sum()), self.config.seed)


def _shown(items: list[Share], progress: bool) -> Iterable[Share]:
    if not progress:
        return items
    from rich.console import Console
    from rich.progress import track

    return track(items, "evaluating", console=Console(stderr=True), transient=True)


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
