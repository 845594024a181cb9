"""Bad samples over all workers and ranks: what a run says of them, and the bound that ends it."""

from __future__ import annotations

import json
from collections import Counter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from forge.agreement import gathered, total
from forge.data.dropping import Dropped
from forge.hardware import Topology
from forge.observe.seen import Seen

if TYPE_CHECKING:
    from forge.trainer import Step


class Drops:
    """Adds up what all ranks were given, at every `every`-th update and the last. Judged is the sum of the time before
    that, which has arrived by then, so that the device is not waited for. In a run of one process, at every update.

    dropped: of the data that are trained on; None: they do not count bad samples.
    """

    def __init__(self, dropped: Dropped | None, seen: Seen, every: int, topology: Topology) -> None:
        self.dropped, self.seen, self.every, self.topology = dropped, seen, every, topology
        self._pending: Tensor | None = None
        if dropped is not None:
            dropped.left_to_all = True

    def __call__(self, step: Step) -> None:
        if self.dropped is None:
            return
        if self.topology.world_size == 1:
            self._judge(self.dropped, self.seen.bad.total(), self.seen.samples)
        elif step.number % self.every == 0 or step.last:
            if self._pending is not None:
                self._judge(self.dropped, *self._pending.tolist())
            sums = torch.tensor([self.seen.bad.total(), self.seen.samples], device=self.topology.device)
            self._pending = total(sums, self.topology)
            if step.last:
                self._judge(self.dropped, *self._pending.tolist())

    def result(self) -> dict[str, Any]:
        """All ranks call it."""
        if self.dropped is None:
            return {"dropped": None}
        num_samples, bad = self._of_all()
        facts = {"opening": self.dropped.by_shard(self.dropped.at_opening), "reading": self.dropped.by_shard(bad),
                 "samples_read": num_samples}
        return {"dropped": facts}

    def _of_all(self) -> tuple[int, Counter[tuple[str, int]]]:
        own = json.dumps([self.seen.samples, [[*which, count] for which, count in self.seen.bad.items()]])
        num_samples, bad = 0, Counter[tuple[str, int]]()
        for samples, counts in map(json.loads, gathered(own, self.topology)):
            num_samples += samples
            bad.update({(reason, shard): count for reason, shard, count in counts})
        return num_samples, bad

    def _judge(self, dropped: Dropped, num_bad: int, num_tried: int) -> None:
        here = dropped.sentence(self.seen.bad)
        dropped.judge(num_bad, num_tried, here or "on other ranks, see log.txt")
