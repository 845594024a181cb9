"""moe_router: how tokens reach their experts. What is routed how is `model.routing`; a router only executes it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol, runtime_checkable

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class Routing:
    """What is routed how: the semantics that every router executes alike. Ties go to the lower expert id.

    score: softmax: probabilities over all experts, of which the top_k highest are taken (Switch Transformer);
        softmax_of_chosen: the top_k highest logits, and a softmax over those (Mixtral); sigmoid: each expert's own
        score (DeepSeek-V3).
    normalize: the weights of the chosen experts sum to one, exactly: nothing is added to the sum. scale: what the
        weights are multiplied by after that.
    num_groups, top_groups: experts stand in so many groups of equal size, and a token chooses among the experts of its
        top_groups best groups, a group's score being the sum of its two best experts' (DeepSeek-V3). 1, 1: no groups.
    shared_hidden: width of one more expert, which every token passes through with weight 1; 0: none.
    jitter: in training, what the gate sees is multiplied by uniform noise from [1 - jitter, 1 + jitter].
    aux_loss: weight, in each layer, of the load-balance loss num_experts * sum_e f_e p_e (Switch Transformer,
        equation 4, with f counting all top_k choices, so that balance gives top_k in each layer; layers are added).
        p: the softmax of all logits, or the sigmoid scores over their sum.
    aux_scope: over which tokens f and p are taken: each sequence, the micro-batch, or f over the global batch as far
        as it has come, on all ranks, and p over the micro-batch (Qiu et al. 2025).
    z_loss: weight of the mean squared log-sum-exp of the router's logits (ST-MoE, equation 5).
    balance: bias: a bias an expert, which only the choice sees, moves by bias_rate against its load after each update
        (Wang et al. 2024). overflow: in training, what an expert holds above `threshold` times the smoothed mean load
        goes, lowest scores first, to the next-best expert of the token that has room. A token has no expert twice, and
        what finds no room stays. A weight is the score of the expert that is used.
    threshold: null: infinite. load_decay: of the moving average of the mean load of a forward pass, a value per
        update. It matters where passes differ in their numbers of tokens.
    balance_from, balance_ramp: updates before overflow balancing begins, and until it has its full effect:
        meanwhile threshold is divided by the part of the ramp that is behind. Skipped updates do not count.
    capacity_factor: choices beyond this many times the mean load of an expert are dropped, lowest scores first, in
        training; the weights of the others stay. null: dropless. For it and for threshold all tokens count that
        experts compute, also those without a target.
    """

    num_experts: int
    top_k: int
    score: Literal["softmax", "softmax_of_chosen", "sigmoid"]
    normalize: bool
    scale: float
    num_groups: int
    top_groups: int
    shared_hidden: int
    jitter: float
    aux_loss: float
    aux_scope: Literal["sequence", "batch", "global_batch"]
    z_loss: float
    balance: Literal["none", "bias", "overflow"]
    bias_rate: float
    threshold: float | None
    load_decay: float
    balance_from: int
    balance_ramp: int
    capacity_factor: float | None

    def problems(self) -> Iterator[str]:
        from forge.moe_router.limits import problems

        yield from problems(self)


@runtime_checkable
class MoERouter(Protocol):
    def build(self, width: int, hidden: int, routing: Routing) -> nn.Module:
        """A mixture of SwiGLU experts: (x [B, T, width], valid [B, T] bool or None) -> (y, aux, load).

        y: [B, T, width]. aux: scalar float32: the auxiliary losses, weighted, as a sum over the valid tokens (mean
        times count), so that it adds up over micro-batches as the loss does. load: [2, num_experts] float32,
        detached: choices as valid tokens made them, which is what balance looks at; and as the experts compute them,
        of all tokens. In training with aux_scope=global_batch and an aux_loss, a third row: the first, of the update
        so far, this pass included, over all ranks.
        Parameters: gate.weight [num_experts, width]; gate_up [num_experts, 2 * hidden, width], gate first;
        down [num_experts, width, hidden]; with a shared expert, shared.up.weight [2 * shared_hidden, width], gate
        first, and shared.down.weight [width, shared_hidden]. The gate computes in float32.
        What it remembers is in buffers and changes in two methods only: see forge.moe_router.memory.Remembering.
        """
        ...
