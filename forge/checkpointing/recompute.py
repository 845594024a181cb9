"""A block that keeps its inputs only, and computes itself again when backward needs the rest."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

if TYPE_CHECKING:
    from torch import nn


def recompute(model: nn.Module, every: int, kept: frozenset[Any]) -> nn.Module:
    """Recompute each `every`-th block of the model, but for the results of the operators in `kept` and of those that
    decide something in this model.

    Replaces the blocks' methods, not the blocks, so that the names of parameters stay.
    """
    trainable: Any = model
    how: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": True}
    kept = kept | trainable.decisions()
    if kept:            # a dense model, fully recomputed, has nothing to look out for, and pays for no looking
        how["context_fn"] = partial(create_selective_checkpoint_contexts, partial(_policy, kept))
    for blocks in trainable.block_lists():
        for block in blocks[::every]:
            block.forward = Recomputed(block.forward, how)
    return model


@dataclass(frozen=True, eq=False)
class Recomputed:
    """Stands in for a block's forward: the same results, with the same dropout the second time.

    A class and not a closure, so that a deep copy of the block is bound to the copy. A Python function and not a
    functools.partial, since torch.compile can begin in the one and not in the other.
    how: arguments of torch.utils.checkpoint.checkpoint.
    """

    forward: Callable[..., Any]
    how: dict[str, Any]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():             # nothing is kept anyway
            return self.forward(*args, **kwargs)
        return checkpoint(self.forward, *args, **self.how, **kwargs)


def _policy(kept: frozenset[Any], context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operator in kept else CheckpointPolicy.PREFER_RECOMPUTE
