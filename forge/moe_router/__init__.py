"""moe_router: how tokens reach their experts. What is routed how is `model.routing`; a router only executes it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol, runtime_checkable

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class Routing:
    """What is routed how: the semantics that every router executes alike. Ties go to the lower expert id.

    normalize: the weights of the chosen experts sum to one.
    aux_loss: weight of the load-balance loss num_experts * sum_e f_e p_e (Switch Transformer, equation 4, with f
        counting all top_k choices, so that balance gives top_k).
    aux_scope: over which tokens f and p are taken: each sequence, or the micro-batch.
    z_loss: weight of the mean squared log-sum-exp of the router's logits (ST-MoE, equation 5).
    """

    num_experts: int
    top_k: int
    normalize: bool
    aux_loss: float
    aux_scope: Literal["sequence", "batch"]
    z_loss: float


@runtime_checkable
class MoERouter(Protocol):
    def build(self, width: int, hidden: int, routing: Routing) -> nn.Module:
        """A mixture of SwiGLU experts: (x [B, T, width], valid [B, T] bool or None) -> (y, aux, load).

        y: [B, T, width]. aux: scalar float32: the auxiliary losses, weighted, as a sum over the valid tokens (mean
        times count), so that it adds up over micro-batches as the loss does. load: [num_experts] float32, detached:
        choices of valid tokens.
        Parameters: gate.weight [num_experts, width]; gate_up [num_experts, 2 * hidden, width], gate first;
        down [num_experts, width, hidden]. The gate computes in float32.
        """
        ...
