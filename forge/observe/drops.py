"""Bad samples over all workers and ranks: what a run says of them, and the bound that ends it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from forge.agreement import gathered, total
from forge.batch import Batch, Work
from forge.data.dropping import Dropped
from forge.hardware import Topology

if TYPE_CHECKING:
    from forge.trainer import Step


class Drops:
    """Adds up what all ranks were given, at every `every`-th update and the last. Judged is the sum of the time before
    that, which has arrived by then, so that the device is not waited for. In a run of one process, at every update.

    dropped: of the data that are trained on; None: they do not count bad samples. samples: read by this rank for what
    was trained on; bad: of those, by (reason, number of the shard). On the first rank of a run that was resumed also
    those of all ranks before: among samples, and as `before` by (reason, shard), since the same data may lie in other
    shards now.
    """

    def __init__(self, dropped: Dropped | None, every: int, topology: Topology) -> None:
        self.dropped, self.every, self.topology = dropped, every, topology
        self.samples = 0
        self.bad: Counter[tuple[str, int]] = Counter()
        self.before: Counter[tuple[str, str]] = Counter()
        self._pending: Tensor | None = None
        if dropped is not None:
            dropped.left_to_all = True

    def counted(self, works: Iterator[Work]) -> Iterator[Work]:
        """The same. A batch counts when it is handed out and not when it is read ahead, so that a resumed run, which
        reads it again, does not count it twice."""
        for work in works:
            yield replace(work, batches=map(self._count, work.batches))

    def _count(self, batch: Batch) -> Batch:
        if batch.reads is not None:
            self.samples += batch.reads.tried
            self.bad.update(batch.reads.bad)
        return batch

    def state_dict(self) -> dict[str, Any]:
        """Of this rank: see RunState.sums."""
        here = Counter[tuple[str, str]]() if self.dropped is None else self.dropped.named(self.bad)
        return {"samples": self.samples, "bad": [[*which, count] for which, count in (self.before + here).items()]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Adds."""
        self.samples += int(state["samples"])
        self.before.update({(str(reason), str(shard)): int(count) for reason, shard, count in state["bad"]})

    def __call__(self, step: Step) -> None:
        if self.dropped is None:
            return
        if self.topology.world_size == 1:
            self._judge(self.dropped, self._num_bad(), self.samples)
        elif step.number % self.every == 0 or step.last:
            if self._pending is not None:
                self._judge(self.dropped, *self._pending.tolist())
            sums = torch.tensor([self._num_bad(), self.samples], device=self.topology.device)
            self._pending = total(sums, self.topology)
            if step.last:
                self._judge(self.dropped, *self._pending.tolist())

    def result(self) -> dict[str, Any]:
        """All ranks call it."""
        if self.dropped is None:
            return {"dropped": None}
        num_samples, bad = 0, Counter[tuple[str, str]]()
        for state in map(json.loads, gathered(json.dumps(self.state_dict()), self.topology)):
            num_samples += state["samples"]
            bad.update({(reason, shard): count for reason, shard, count in state["bad"]})
        facts = {"opening": _by_shard(self.dropped.named(self.dropped.at_opening)), "reading": _by_shard(bad),
                 "samples_read": num_samples}
        return {"dropped": facts}

    def _num_bad(self) -> int:
        return self.bad.total() + self.before.total()

    def _judge(self, dropped: Dropped, num_bad: int, num_tried: int) -> None:
        others = num_bad - self._num_bad()
        named = [dropped.sentence(self.bad), _sentence(self.before, "before the run was resumed"),
                 f"{others} on other ranks, see log.txt" if others > 0 else ""]
        dropped.judge(num_bad, num_tried, "; ".join(filter(None, named)))


def _sentence(counts: Mapping[tuple[str, str], int], where: str) -> str:
    """"" where there are none."""
    told = [f"{count} for {reason} in {shard}" for (reason, shard), count in sorted(counts.items())]
    return f"{where}: {', '.join(told)}" if told else ""


def _by_shard(counts: Mapping[tuple[str, str], int]) -> dict[str, dict[str, int]]:
    """Reason -> shard -> count."""
    sorted_by: dict[str, dict[str, int]] = {}
    for (reason, shard), count in sorted(counts.items()):
        sorted_by.setdefault(reason, {})[shard] = count
    return sorted_by
