"""Which samples of a split a model answers exactly."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import nn

from forge.agreement import total
from forge.batch import IGNORED
from forge.data import Sample, Source
from forge.observe.evaluate import Judge, as_in_evaluation

_FIRST = 1 << 40        # far from every token id, so that nothing takes the number of a sample for one


@dataclass(frozen=True)
class Answered:
    """loss: nats a target. right: [samples] bool. judged: [samples] bool, those that had a target."""

    loss: float
    right: np.ndarray
    judged: np.ndarray

    @property
    def exact(self) -> float:
        """The share of the judged samples that were answered exactly."""
        return float(self.right[self.judged].mean()) if self.judged.any() else 0.0

    def exact_by(self, kinds: np.ndarray) -> dict[str, float]:
        """The same of each kind. kinds: [samples] of their names."""
        num_right, num_judged = Counter(kinds[self.right & self.judged]), Counter(kinds[self.judged])
        return {str(kind): num_right[kind] / count for kind, count in sorted(num_judged.items())}


class Numbered:
    """A source of the same lengths whose tokens are the number of their sample.

    Put into rows beside the source itself, its targets tell whose the other's targets are, whatever batching does.
    """

    def __init__(self, source: Source) -> None:
        self.lengths, self.fingerprint = source.lengths, source.fingerprint

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> Sample:
        return {"tokens": torch.full((int(self.lengths[index]),), _FIRST + index)}


def answered(judge: Judge, model: nn.Module, batches: int | None) -> Answered:
    """Over at most so many batches of every rank; all ranks call it, and all learn of all samples.

    A sample is answered exactly where the model's likeliest token is the target at each of its targets, the tokens
    before it being the true ones: which is where greedy decoding writes just that. Of a sample that lies in several
    rows each counts, as far as it was judged.
    """
    sums = torch.zeros(1 + 2 * len(judge.source), dtype=torch.float64, device=judge.topology.device)
    num_targets, num_missed = sums[1:].view(2, -1)
    owned = replace(judge, source=Numbered(judge.source))
    with as_in_evaluation(model):
        for batch, owners in zip(judge.batches(batches), owned.batches(batches), strict=True):
            nats, missed = judge.by_target(model, batch)
            owner = owners.tensors["targets"][batch.tensors["targets"] != IGNORED].to(missed.device) - _FIRST
            sums[0] += nats.sum()
            num_targets.index_add_(0, owner, torch.ones_like(missed))
            num_missed.index_add_(0, owner, missed)
    total(sums, judge.topology)
    judged = (num_targets > 0).cpu().numpy()
    return Answered(float(sums[0] / num_targets.sum().clamp(min=1)), (num_missed == 0).cpu().numpy() & judged, judged)
