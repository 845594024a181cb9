"""balance=overflow: what is too much for an expert goes to the next-best one that has room.

The rule, token by token: of each expert that holds more than `limit` choices, those with the lowest scores are surplus
(of equal scores, those of the higher token ids). Then one surplus choice after the other, the highest score first and
of equal ones the lower token id, goes to the best expert of its token that has room and that the token does not have
yet; where there is none, it stays.

Here whole stretches of that order are settled at once. As long as no expert fills up, all of them see the same room,
so each can say on its own where it goes; a stretch ends before the first that would be one too many. Each stretch but
the last fills an expert, so there are fewer stretches than experts, and nothing has to be asked of the device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from forge.decisions import decision
from forge.moe_router.choice import places, ranked, tokens_per_expert


@decision("reroute")
def reroute(keys: Tensor, experts: Tensor, scores: Tensor, limit: Tensor, num_groups: int, top_groups: int) -> Tensor:
    """[N, k] int64: the choices after balancing.

    keys [N, E], num_groups, top_groups: as in choose_experts, which gave experts [N, k]. scores: [N, k], of the
    choices. limit: scalar int64.
    """
    num_tokens, num_experts = keys.shape
    candidates = ranked(keys, num_groups, top_groups)
    pending = places(experts, scores, num_experts) >= limit
    queue = _queue(pending, scores)
    has = torch.zeros(num_tokens, num_experts + 1, dtype=torch.bool, device=keys.device).scatter(1, experts, True)
    room = (limit - tokens_per_expert(experts, num_experts).long()).clamp(min=0)
    experts = experts.clone()           # an operator gives no input back, as one expert would have it
    for _ in range(num_experts - 1):
        wanted = _next_best(candidates, room, has, pending, queue)
        settled, taken = _stretch(wanted, room, queue)
        moved = settled & pending & (wanted < num_experts)
        experts = torch.where(moved, wanted, experts)
        has = has.scatter(1, torch.where(moved, wanted, num_experts), True)
        room, pending = room - taken, pending & ~settled
    return experts


@reroute.register_fake
def _(keys: Tensor, experts: Tensor, scores: Tensor, limit: Tensor, num_groups: int, top_groups: int) -> Tensor:
    return torch.empty_like(experts)


def _queue(pending: Tensor, scores: Tensor) -> Tensor:
    """[N, k]: the turn of each choice, from 0. Surplus comes first, in the order of scores, then of tokens."""
    by_score = scores.flatten().sort(descending=True, stable=True).indices
    surplus_first = (~pending).flatten()[by_score].sort(stable=True).indices
    turns = torch.arange(by_score.numel(), device=scores.device)
    return torch.empty_like(turns).scatter(0, by_score[surplus_first], turns).view_as(pending)


def _next_best(candidates: Tensor, room: Tensor, has: Tensor, pending: Tensor, queue: Tensor) -> Tensor:
    """[N, k]: where each pending choice would go with this much room; num_experts: nowhere.

    Of several surplus choices of one token, the one whose turn comes second gets the second best, and so on.
    """
    free = (room > 0)[candidates] & ~has.gather(1, candidates)
    earlier = pending.unsqueeze(1) & (queue.unsqueeze(1) < queue.unsqueeze(2))
    index = torch.searchsorted(free.cumsum(dim=1), earlier.sum(dim=2) + 1)
    nowhere = torch.full_like(candidates[:, :1], len(room))
    return torch.where(pending, torch.cat([candidates, nowhere], dim=1).gather(1, index), len(room))


def _stretch(wanted: Tensor, room: Tensor, queue: Tensor) -> tuple[Tensor, Tensor]:
    """(settled [N, k], taken [E]): the choices before the first that finds its expert full, and their number by
    expert."""
    size, turn = queue.numel(), torch.arange(queue.numel(), device=queue.device)
    in_turn = torch.empty_like(turn).scatter(0, queue.flatten(), wanted.flatten())
    keys = (in_turn * size + turn).sort().values            # by expert, then by turn
    experts = keys // max(size, 1)
    starts = torch.searchsorted(keys, torch.arange(len(room) + 1, device=keys.device) * size)
    unlimited = torch.cat([room, room.new_full((1,), size)])
    too_many = turn - starts[experts] >= unlimited[experts]
    end = torch.where(too_many, keys % max(size, 1), size).min() if size else room.new_zeros(())
    ends = torch.searchsorted(keys, torch.arange(len(room), device=keys.device) * size + end)
    return queue < end, ends - starts[: len(room)]
