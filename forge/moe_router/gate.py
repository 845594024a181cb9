"""Which experts a token goes to, with which weight, and what imbalance costs. Shared by all routers."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from forge.moe_router import Routing
from forge.moe_router.balance import balance_loss, z_loss
from forge.moe_router.choice import choose_experts, count_over_update, drop_surplus, tokens_per_expert
from forge.moe_router.exact import plain_product, split_product
from forge.moe_router.memory import Memory, sees_update
from forge.moe_router.overflow import reroute


class Choice(NamedTuple):
    """Where N = B * T tokens go. Floating-point tensors are float32 (float64 for a float64 model).

    experts: [N, top_k] int64, best first; num_experts: dropped. weights: [N, top_k], differentiable.
    aux: scalar, differentiable. load: see forge.moe_router.MoERouter. placement: where a router has placed the choices
    while it made them, in whichever form it uses.
    """

    experts: Tensor
    weights: Tensor
    aux: Tensor
    load: Tensor
    placement: list[Tensor] | None = None


def choose(x: Tensor, valid: Tensor | None, gate_weight: Tensor, routing: Routing, memory: Memory,
           training: bool) -> Choice:
    """x: [B, T, width]. valid: [B, T] bool; other tokens are routed and computed too, and take room, but count neither
    in aux nor among the choices that balance looks at."""
    valid = torch.ones_like(x[..., 0], dtype=torch.bool) if valid is None else valid
    logits = logits_of(x, gate_weight, routing.jitter if training else 0.0)
    scores = _scores(logits, routing)
    keys = _keys(logits, scores, memory.bias, routing).detach().flatten(0, 1)
    chosen = choose_experts(keys, routing.top_k, routing.num_groups, routing.top_groups)
    used = _rerouted(keys, chosen, scores, routing, memory) if training and reroutes(routing) else chosen
    weights = _weights(logits.flatten(0, 1), scores.flatten(0, 1), used, routing)
    kept = _kept(used, scores, routing) if training and routing.capacity_factor is not None else used

    counts = counts_of(chosen, valid, scores)
    aux, so_far = imbalance(logits, counts, valid, routing, memory, training)
    load = torch.stack([counts.sum(dim=(0, 1)), tokens_per_expert(kept, routing.num_experts)]).float()
    return Choice(kept, weights, aux, with_update(load, so_far))


def imbalance(logits: Tensor, counts: Tensor, valid: Tensor, routing: Routing, memory: Memory,
              training: bool) -> tuple[Tensor, Tensor | None]:
    """(what the auxiliary losses come to, scalar; the load of the update so far, where that is looked at).

    logits: [B, T, num_experts]; counts: see counts_of; valid: [B, T].
    """
    so_far = None
    if training and sees_update(routing):
        so_far = count_over_update(counts.sum(dim=(0, 1)).float(), memory.load_so_far)
    probabilities = _shares(logits) if routing.score == "sigmoid" else logits.softmax(dim=-1)
    return balance_loss(probabilities, counts, valid, routing, so_far) + z_loss(logits, valid, routing), so_far


def with_update(load: Tensor, so_far: Tensor | None) -> Tensor:
    """The load of a pass [2, num_experts], and as a third row that of the update, if there is one."""
    return load.detach() if so_far is None else torch.cat([load, so_far.unsqueeze(0)]).detach()


def reroutes(routing: Routing) -> bool:
    """Whether overflow balancing can have an effect."""
    return routing.balance == "overflow" and routing.threshold is not None


def may_move_choices(routing: Routing) -> bool:
    """Whether, in training, an expert may compute other choices than the tokens made."""
    return reroutes(routing) or routing.capacity_factor is not None


def logits_of(x: Tensor, gate_weight: Tensor, jitter: float) -> Tensor:
    """[B, T, num_experts], computed in float32 also under autocast: bfloat16 would tie and swap close experts."""
    with torch.autocast(x.device.type, enabled=False):
        if jitter > 0:
            x = x.to(torch.promote_types(x.dtype, torch.float32))
            x = x * (1 + jitter * (2 * torch.rand_like(x) - 1))
        splits = x.is_cuda and x.dtype == torch.bfloat16 and gate_weight.dtype in (torch.bfloat16, torch.float32)
        return (split_product if splits else plain_product)(x, gate_weight)


def _scores(logits: Tensor, routing: Routing) -> Tensor:
    """[B, T, num_experts]: each expert's own (sigmoid), or its share among all."""
    return logits.sigmoid() if routing.score == "sigmoid" else logits.softmax(dim=-1)


def _shares(logits: Tensor) -> Tensor:
    """Sigmoid scores over their sum. By logarithms, since the sum of tiny scores may be 0."""
    # The logarithm of a sigmoid. Not by F.logsigmoid, whose gradient is wrong on a CPU where a recomputed block is
    # compiled (torch 2.13).
    return (-F.softplus(-logits)).softmax(dim=-1)


def _keys(logits: Tensor, scores: Tensor, bias: Tensor, routing: Routing) -> Tensor:
    """[B, T, num_experts]: what experts are chosen by: score + bias; of softmax_of_chosen logit + bias.

    Without groups and where all biases are 0, the logits: the same order, but for the ties that the rounding of scores
    makes and breaks.
    """
    biased = (logits if routing.score == "softmax_of_chosen" else scores) + bias
    return biased if routing.num_groups > 1 else torch.where(bias.any(), biased, logits)


def _weights(logits: Tensor, scores: Tensor, experts: Tensor, routing: Routing) -> Tensor:
    """[N, top_k], of logits and scores [N, num_experts].

    Scores that are made to sum to one are a softmax of their logarithms. So there is no small number to add to the sum,
    with which a router could make its weights vanish by making all scores small, and no 0 / 0.
    """
    mine = logits.gather(-1, experts)
    if routing.score == "sigmoid":
        weights = _shares(mine) if routing.normalize else mine.sigmoid()
    elif routing.score == "softmax_of_chosen" or routing.normalize:
        weights = mine.softmax(dim=-1)
    else:
        weights = scores.gather(-1, experts)
    return weights * routing.scale


def _rerouted(keys: Tensor, chosen: Tensor, scores: Tensor, routing: Routing, memory: Memory) -> Tensor:
    assert routing.threshold is not None
    mean = torch.where(memory.mean_load > 0, memory.mean_load, _mean_load(chosen, scores))
    ramp = ((memory.num_updates - routing.balance_from) / max(routing.balance_ramp, 1)).clamp(0, 1)
    ramp = torch.where(memory.num_updates >= routing.balance_from + routing.balance_ramp, 1.0, ramp)
    capacity = torch.where(ramp > 0, routing.threshold * mean / ramp, torch.inf)
    mine = scores.detach().flatten(0, 1).gather(-1, chosen)
    used: Tensor = reroute(keys, chosen, mine, _whole(capacity, chosen), routing.num_groups, routing.top_groups)
    return used


def _kept(experts: Tensor, scores: Tensor, routing: Routing) -> Tensor:
    assert routing.capacity_factor is not None
    capacity = routing.capacity_factor * _mean_load(experts, scores)
    mine = scores.detach().flatten(0, 1).gather(-1, experts)
    kept: Tensor = drop_surplus(experts, mine, _whole(capacity, experts), routing.num_experts)
    return kept


def _mean_load(experts: Tensor, scores: Tensor) -> Tensor:
    """Scalar: choices [N, top_k] per expert, of all tokens, since all are computed."""
    return scores.new_full((), experts.numel()) / scores.shape[-1]


def _whole(capacity: Tensor, experts: Tensor) -> Tensor:
    """How many choices an expert may hold: rounded up, so that few tokens are not all dropped. More than there are is
    as good as infinite."""
    below: Tensor = capacity * (1 - 2**-20)     # or a product that rounds to just above a whole number would add one
    return below.clamp(max=experts.numel()).ceil().to(torch.int64)


def counts_of(experts: Tensor, valid: Tensor, like: Tensor) -> Tensor:
    """[B, T, num_experts]: 1 where a valid token goes to the expert."""
    once = like.new_zeros(experts.shape[0], like.shape[-1] + 1).scatter(-1, experts, 1.0)[:, :-1]
    return once.view_as(like).masked_fill(~valid.unsqueeze(-1), 0)
