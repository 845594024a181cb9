"""What imbalance costs: the auxiliary losses. Each is a sum over the valid tokens, weighted, so that it adds up.

probabilities, chosen: [B, T, num_experts], of which chosen counts 1 for each choice of a valid token. valid: [B, T].
"""

from __future__ import annotations

from torch import Tensor

from forge.moe_router import Routing


def balance_loss(probabilities: Tensor, chosen: Tensor, valid: Tensor, routing: Routing,
                 so_far: Tensor | None) -> Tensor:
    """num_experts * sum_e f_e p_e of each group of tokens, times the group's valid tokens.

    f_e: choices of expert e per valid token; p_e: mean probability of e; a group is a sequence or the micro-batch.
    so_far: [num_experts], choices of the update up to and with this micro-batch, over all ranks: f_e is taken over them
    (Qiu et al. 2025). None: by aux_scope, as in evaluation, where there is no update.
    """
    if routing.aux_loss == 0:
        return probabilities.new_zeros(())
    probabilities = probabilities.masked_fill(~valid.unsqueeze(-1), 0)
    if so_far is not None:
        share = so_far / (so_far.sum() / routing.top_k).clamp(min=1)
        products: Tensor = share * probabilities.sum(dim=(0, 1))
        return products.sum() * (routing.aux_loss * routing.num_experts)
    if routing.aux_scope != "sequence":
        probabilities, chosen, valid = (tensor.flatten(0, 1).unsqueeze(0) for tensor in (probabilities, chosen, valid))
    count = valid.sum(dim=1).to(probabilities.dtype)
    # mean times count: one of the two divisions by count is undone, and an empty group gives 0 and not nan.
    groups = (chosen.sum(dim=1) * probabilities.sum(dim=1)).sum(dim=-1) / count.clamp(min=1)
    return groups.sum() * (routing.aux_loss * routing.num_experts)


def z_loss(logits: Tensor, valid: Tensor, routing: Routing) -> Tensor:
    """The squared log-sum-exp of the logits [B, T, num_experts], summed over valid tokens."""
    if routing.z_loss == 0:
        return logits.new_zeros(())
    return logits.logsumexp(dim=-1).square().masked_fill(~valid, 0).sum() * routing.z_loss
