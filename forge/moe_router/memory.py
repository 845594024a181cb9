"""What a mixture remembers from one forward pass to the next, and from one update to the next; and when it changes.

Imported by models without experts too, so nothing here decides (see forge.decisions).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import torch
from torch import Tensor, nn

from forge.agreement import sum_over_ranks

if TYPE_CHECKING:
    from forge.moe_router import Routing

WITHIN_UPDATE = ("load_so_far",)        # empty between two updates, so that no snapshot holds it


class Memory(NamedTuple):
    """Float32. It changes between forward passes, never in one.

    bias: [num_experts], added to the scores for the choice; 0 unless balance is bias.
    mean_load: scalar: how many choices an expert computes in a forward pass of one rank, as a mean over experts and a
    moving average over updates. num_updates: scalar: how many were applied. Both 0 unless balance is overflow.
    load_so_far: [num_experts]: choices of this update's forward passes, over all ranks; 0 unless aux_scope is
    global_batch.
    """

    bias: Tensor
    mean_load: Tensor
    num_updates: Tensor
    load_so_far: Tensor

    @classmethod
    def empty(cls, num_experts: int) -> Memory:
        def zeros(*size: int) -> Tensor:
            return torch.zeros(size, dtype=torch.float32)

        return cls(bias=zeros(num_experts), mean_load=zeros(), num_updates=zeros(), load_so_far=zeros(num_experts))


class Remembering(nn.Module):
    """A module with a Memory, as buffers of its names. In place, as a CUDA graph reads the same memory."""

    bias: Tensor
    mean_load: Tensor
    num_updates: Tensor
    load_so_far: Tensor

    def __init__(self, routing: Routing) -> None:
        super().__init__()
        self.routing = routing
        for name, value in Memory.empty(routing.num_experts)._asdict().items():
            self.register_buffer(name, value, persistent=name not in WITHIN_UPDATE)

    def memory(self) -> Memory:
        return Memory(*(getattr(self, name) for name in Memory._fields))

    @torch.no_grad()
    def remember(self, load_so_far: Tensor) -> None:
        """After a forward pass: what it says of the update so far, for those that follow in it."""
        self.load_so_far.copy_(load_so_far)

    @torch.no_grad()
    def after_update(self, load: Tensor, num_passes: Tensor, applied: Tensor) -> None:
        """Once an update. load: [2, num_experts], see forge.moe_router.MoERouter, over all its passes, on all ranks.
        applied: scalar bool; where it is False, only what was seen of the update is forgotten."""
        routing, (chosen, computed) = self.routing, load
        self.load_so_far.zero_()
        if routing.balance == "bias":
            moved = self.bias + routing.bias_rate * (chosen.mean() - chosen).sign()
            self.bias.copy_(torch.where(applied, moved, self.bias))
        elif routing.balance == "overflow":
            mean = computed.mean() / num_passes
            smooth = mean + routing.load_decay * (self.mean_load - mean)
            smooth = torch.where(self.mean_load > 0, smooth, mean)
            self.mean_load.copy_(torch.where(applied, smooth, self.mean_load))
            self.num_updates += applied

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Moves and casts, but for what is remembered: it is moved only. In bfloat16 a bias of 0.5 would not change by
        0.001, and a count not by one above 256."""
        kept = self.memory()._asdict()
        super()._apply(fn, recurse)         # type: ignore[no-untyped-call]
        for name, value in kept.items():
            setattr(self, name, value.to(getattr(self, name).device))
        return self

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        """A snapshot from before the mixture remembered anything leaves it as it is."""
        for name, value in self.memory()._asdict().items():
            if name not in WITHIN_UPDATE:
                state_dict.setdefault(prefix + name, value.clone())
        super()._load_from_state_dict(state_dict, prefix, *rest)


# Of a whole model: mixtures are one a layer, None where it is dense; load is [layers, 2 or 3, num_experts].

def sees_update(routing: Routing) -> bool:
    """Whether a forward pass looks at those before it in the same update."""
    return routing.aux_loss > 0 and routing.aux_scope == "global_batch"


def terms_of(routing: Routing, load: Tensor) -> dict[str, Tensor]:
    """What adds up over the passes of an update, to be read by `remember_update` and in metrics.jsonl."""
    terms = {"expert_choices": load[:, 0], "expert_load": load[:, 1]}
    if routing.balance == "overflow":
        terms["forward_passes"] = load.new_ones(())
    return terms


def remember_pass(mixtures: Sequence[Remembering | None], load: Tensor) -> None:
    """Once a forward pass of training, outside of compiled and recomputed code."""
    for mixture, (_, _, *so_far) in zip(mixtures, load, strict=True):
        if mixture is not None and so_far:
            mixture.remember(so_far[0])


@torch.no_grad()
def remember_update(routing: Routing, mixtures: Sequence[Remembering | None], terms: dict[str, Tensor],
                    applied: Tensor) -> None:
    """Once an update. All ranks call it, with their own terms."""
    if routing.balance == "none" and not sees_update(routing):
        return
    load = torch.stack([terms["expert_choices"], terms["expert_load"]], dim=1)
    sums = torch.cat([load.flatten(), terms.get("forward_passes", load.new_ones(())).view(1)])
    if routing.balance != "none":
        sums = sum_over_ranks(sums)
    for mixture, mine in zip(mixtures, sums[:-1].view_as(load), strict=True):
        if mixture is not None:
            mixture.after_update(mine, sums[-1], applied)
