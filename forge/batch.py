"""What flows down the pipeline: positions, batches, and the work of one update."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from forge.data.dropping import Reads

IGNORED = -100      # the target of a position that is not predicted (PyTorch's ignore_index)


@dataclass(frozen=True, order=True)
class Cursor:
    """A position in the data: the global batch `index` of epoch `epoch` comes next."""

    epoch: int = 0
    index: int = 0


@dataclass(frozen=True)
class Batch:
    """One micro-batch.

    tensors: "tokens" [B, T] int64, "targets" [B, T] int64 (IGNORED where nothing is predicted), and, where a mask
        by document is asked for, "documents" [B, T] int32, "positions" [B, T] int64; where rows end in padding,
        "lengths" [B] int64, what comes before it. Of data with pictures also "pictures" [P, S, S, 3] uint8, all of the
        batch in the order of their placeholders, and "picture_seeds" [P] int64, which depend on seed, epoch and sample
        alone (or "picture_samples" [P, 2] int64 where nothing is drawn: the sample, and the number within it). An
        augmentation leaves "pictures" as float [P, 3, size, size], normalised.
    num_targets: how many targets are not IGNORED.
    seed: what the model draws from (dropout, jitter); a function of the position in the data, so a resumed run
        and a re-ordered one draw the same.
    reads: how many samples were read for it, and which of them were bad; None: the data do not count them.
    """

    tensors: dict[str, Tensor]
    num_targets: int
    seed: int
    reads: Reads | None = None

    def to(self, device: torch.device) -> Batch:
        moved = {name: tensor.to(device, non_blocking=True) for name, tensor in self.tensors.items()}
        return replace(self, tensors=moved)

    def pin_memory(self) -> Batch:
        return replace(self, tensors={name: tensor.pin_memory() for name, tensor in self.tensors.items()})


@dataclass(frozen=True)
class Work:
    """This rank's share of one update. The cursor rides on it, so that a snapshot records what was trained on
    and not what was read ahead.

    num_targets: targets in all batches, this rank's share.
    cursor: where the data stands once this work is done.
    """

    num_targets: int
    batches: Iterable[Batch]
    cursor: Cursor

    def pin_memory(self) -> Work:
        return replace(self, batches=[batch.pin_memory() for batch in self.batches])
