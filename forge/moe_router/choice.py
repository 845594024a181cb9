"""Which experts a token goes to: the part of routing that has no gradient, as operators whose results are kept.

N tokens, E experts, k of them a token. An expert id of E means: dropped, no expert computes it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from forge.agreement import sum_over_ranks
from forge.decisions import decision


@decision("choose_experts")
def choose_experts(keys: Tensor, top_k: int, num_groups: int, top_groups: int) -> Tensor:
    """[N, k] int64: the experts with the highest keys [N, E], best first, of the top_groups best groups.

    Equal keys: the lower id first, of experts and of groups. nan counts as the highest, and ids are distinct even then.
    """
    return ranked(keys, num_groups, top_groups)[:, :top_k].contiguous()


@choose_experts.register_fake
def _(keys: Tensor, top_k: int, num_groups: int, top_groups: int) -> Tensor:
    return keys.new_empty(keys.shape[0], top_k, dtype=torch.int64)


@decision("drop_surplus")
def drop_surplus(experts: Tensor, scores: Tensor, limit: Tensor, num_experts: int) -> Tensor:
    """[N, k]: the choices, of which each expert keeps `limit` (scalar int64), those with the highest scores [N, k], and
    of equal ones those of the lower token ids. The others are dropped."""
    return torch.where(places(experts, scores, num_experts) >= limit, num_experts, experts)


@drop_surplus.register_fake
def _(experts: Tensor, scores: Tensor, limit: Tensor, num_experts: int) -> Tensor:
    return torch.empty_like(experts)


@decision("count_over_update")
def count_over_update(load: Tensor, before: Tensor) -> Tensor:
    """[E]: the choices of this forward pass, summed over the ranks, and of those `before` it in the same update. All
    ranks call it. A decision, since a recomputation comes when `before` has grown."""
    return before + sum_over_ranks(load)


@count_over_update.register_fake
def _(load: Tensor, before: Tensor) -> Tensor:
    return torch.empty_like(before)


def ranked(keys: Tensor, num_groups: int, top_groups: int) -> Tensor:
    """[N, top_groups * E / num_groups]: the ids of all experts that a token may choose, best first."""
    # A stable sort, since topk leaves the order of ties open and CPU, GPU and kernels would differ.
    ranking = keys.sort(dim=-1, descending=True, stable=True).indices
    if num_groups == top_groups:
        return ranking
    size = keys.shape[-1] // num_groups
    best = keys.unflatten(-1, (num_groups, size)).sort(dim=-1, descending=True).values[..., :2].sum(dim=-1)
    chosen = best.sort(dim=-1, descending=True, stable=True).indices[..., :top_groups]
    outside = torch.ones_like(best, dtype=torch.bool).scatter(-1, chosen, False)
    # By a second sort and not by keys of -inf, which an expert of a chosen group may have too.
    behind = outside.gather(-1, ranking // size).sort(dim=-1, stable=True).indices
    return ranking.gather(-1, behind)[..., : top_groups * size]


def tokens_per_expert(experts: Tensor, num_experts: int) -> Tensor:
    """[num_experts] int32, of choices [N, k]. Not by bincount, which makes the host wait for the GPU."""
    once = torch.zeros(experts.shape[0], num_experts + 1, dtype=torch.int32, device=experts.device)
    return once.scatter(-1, experts, 1).sum(dim=0, dtype=torch.int32)[:num_experts]


def places(experts: Tensor, scores: Tensor, num_experts: int) -> Tensor:
    """[N, k] int64: the place of each choice in the order of its expert's scores, from 0, the highest; equal ones in
    the order of tokens. Ids go up to num_experts, and including it."""
    by_score = scores.flatten().sort(descending=True, stable=True).indices
    grouped, order = experts.flatten()[by_score].sort(stable=True)
    within = torch.arange(grouped.numel(), device=grouped.device) - _starts(grouped, num_experts)[grouped]
    return torch.empty_like(within).scatter(0, by_score[order], within).view_as(experts)


def _starts(grouped: Tensor, num_experts: int) -> Tensor:
    """[num_experts + 1]: where each expert begins in a sorted list of ids."""
    return torch.searchsorted(grouped, torch.arange(num_experts + 1, device=grouped.device))
