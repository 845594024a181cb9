"""Which experts a token goes to, with which weight, and what imbalance costs. Shared by all routers."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from forge.moe_router import Routing


class Choice(NamedTuple):
    """Where N = B * T tokens go. Floating-point tensors are float32 (float64 for a float64 model).

    experts: [N, top_k] int64, best first. weights: [N, top_k], differentiable.
    aux: scalar, differentiable. load: [num_experts], choices of valid tokens.
    """

    experts: Tensor
    weights: Tensor
    aux: Tensor
    load: Tensor


def choose(x: Tensor, valid: Tensor | None, gate_weight: Tensor, routing: Routing) -> Choice:
    """x: [B, T, width]. valid: [B, T] bool; other tokens are routed too, but count in neither aux nor load."""
    logits = _logits(x, gate_weight)
    probabilities = logits.softmax(dim=-1)
    # A stable sort, since topk leaves the order of ties open and CPU, GPU and kernels would differ. By logits, since
    # rounding in a softmax makes and breaks ties.
    ranking = logits.detach().sort(dim=-1, descending=True, stable=True).indices
    experts = ranking[..., : routing.top_k]
    weights = probabilities.gather(-1, experts)
    if routing.normalize:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    chosen = torch.zeros_like(logits).scatter(-1, experts, 1.0)
    if valid is not None:
        chosen = chosen.masked_fill(~valid.unsqueeze(-1), 0)
    aux = _balance_loss(probabilities, chosen, valid, routing) + _z_loss(logits, valid, routing)
    return Choice(experts.flatten(0, 1), weights.flatten(0, 1), aux, chosen.sum(dim=(0, 1)))


def _logits(x: Tensor, gate_weight: Tensor) -> Tensor:
    """[B, T, num_experts], computed in float32 also under autocast: bfloat16 would tie and swap close experts."""
    with torch.autocast(x.device.type, enabled=False):
        dtype = torch.promote_types(x.dtype, torch.float32)
        return F.linear(x.to(dtype), gate_weight.to(dtype))


def _balance_loss(probabilities: Tensor, chosen: Tensor, valid: Tensor | None, routing: Routing) -> Tensor:
    """num_experts * sum_e f_e p_e of each group of tokens, times the group's valid tokens, weighted.

    f_e: choices of expert e per valid token; p_e: mean probability of e; a group is a sequence or the micro-batch.
    """
    if routing.aux_loss == 0:
        return probabilities.new_zeros(())
    if valid is None:
        valid = torch.ones_like(probabilities[..., 0], dtype=torch.bool)
    probabilities = probabilities.masked_fill(~valid.unsqueeze(-1), 0)
    if routing.aux_scope == "batch":
        probabilities, chosen, valid = (tensor.flatten(0, 1).unsqueeze(0) for tensor in (probabilities, chosen, valid))
    count = valid.sum(dim=1).to(probabilities.dtype)
    # mean times count: one of the two divisions by count is undone, and an empty group gives 0 and not nan.
    groups = (chosen.sum(dim=1) * probabilities.sum(dim=1)).sum(dim=-1) / count.clamp(min=1)
    return groups.sum() * (routing.aux_loss * routing.num_experts)


def _z_loss(logits: Tensor, valid: Tensor | None, routing: Routing) -> Tensor:
    """The squared log-sum-exp of the logits, summed over valid tokens, weighted."""
    if routing.z_loss == 0:
        return logits.new_zeros(())
    squares = logits.logsumexp(dim=-1).square()
    if valid is not None:
        squares = squares.masked_fill(~valid, 0)
    return squares.sum() * routing.z_loss
