"""Which settings of model.routing cannot be, and which do nothing. Does not import torch."""

from __future__ import annotations

from collections.abc import Iterator

from forge.moe_router import Routing

OF_OVERFLOW = ("load_decay", "balance_from", "balance_ramp")        # what says more of a threshold


def problems(routing: Routing) -> Iterator[str]:
    """A sentence for each, with the setting, its value, and the mend."""
    yield from _choice(routing)
    yield from _balance(routing)
    for name in ("aux_loss", "z_loss", "bias_rate", "shared_hidden", "balance_from", "balance_ramp"):
        if not 0 <= getattr(routing, name) < float("inf"):
            yield f"model.routing.{name}={getattr(routing, name)}: 0 or more is wanted."
    if not 0 <= routing.jitter < 1:
        yield f"model.routing.jitter={routing.jitter}: 0 (none) to below 1 is wanted, or noise may turn signs round."
    if not 0 < routing.scale < float("inf"):
        yield f"model.routing.scale={routing.scale}: more than 0 is wanted; 1 changes nothing."


def idle(routing: Routing) -> dict[str, str]:
    """The settings that do nothing beside the others, each with the other that brings it into play."""
    found = {}
    if routing.balance != "bias":
        found["bias_rate"] = "model.routing.balance=bias"
    if routing.balance != "overflow":
        found |= dict.fromkeys(("threshold", *OF_OVERFLOW), "model.routing.balance=overflow")
    elif routing.threshold is None:
        found |= dict.fromkeys(OF_OVERFLOW, "model.routing.threshold above 1")
    if routing.aux_loss == 0:
        found["aux_scope"] = "model.routing.aux_loss above 0"
    return found


def _choice(routing: Routing) -> Iterator[str]:
    experts, top_k, groups = routing.num_experts, routing.top_k, routing.num_groups
    if not 1 <= top_k <= experts:
        yield (f"model.routing.top_k={top_k} does not fit model.routing.num_experts={experts}: a token chooses between "
               f"1 and all experts.")
    elif groups < 1 or experts % groups:
        yield (f"model.routing.num_groups={groups} does not divide model.routing.num_experts={experts}: groups are of "
               f"equal size. 1 means no groups.")
    elif not 1 <= routing.top_groups <= groups:
        yield (f"model.routing.top_groups={routing.top_groups} does not fit model.routing.num_groups={groups}: a token "
               f"chooses among the experts of between 1 and all groups.")
    elif routing.top_groups * (experts // groups) < top_k:
        yield (f"model.routing.top_groups={routing.top_groups} groups of {experts // groups} experts are fewer experts "
               f"than model.routing.top_k={top_k}: raise top_groups, or lower top_k.")


def _balance(routing: Routing) -> Iterator[str]:
    if not 0 <= routing.load_decay < 1:
        yield f"model.routing.load_decay={routing.load_decay}: 0 (no memory) to below 1 is wanted."
    if routing.threshold is not None and not routing.threshold > 1:
        yield (f"model.routing.threshold={routing.threshold}: more than 1 is wanted, or an expert with the mean load "
               f"would hold too much; null for no limit.")
    if routing.capacity_factor is None:
        return
    if not routing.capacity_factor > 0:
        yield f"model.routing.capacity_factor={routing.capacity_factor}: more than 0 is wanted; null drops nothing."
    if routing.balance == "overflow":
        yield (f"model.routing.capacity_factor={routing.capacity_factor} drops what model.routing.balance=overflow "
               f"finds another expert for: set capacity_factor=null, or balance=none.")
