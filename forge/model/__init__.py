"""model: what is trained. A model is put together from parts that other groups choose."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from forge.attention import Attention
from forge.loss import Loss
from forge.moe_router import MoERouter
from forge.operators import Operators

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from forge.batch import Batch
    from forge.model.flops import Forward
    from forge.optimizer import Outcome


@dataclass(frozen=True)
class Parts:
    """The choices of other groups that the model is built from."""

    attention: Attention
    operators: Operators
    moe_router: MoERouter
    loss: Loss


class Trainable(Protocol):
    """What `Model.build` returns: an nn.Module with this written contract.

    `forward` may do what cannot be compiled (plan the attention of the batch); everything else happens in `compute`,
    a function of tensors that compile=whole replaces by its compiled self.
    """

    compute: object                     # callable; see above
    score: object                       # callable: what comes after the last block; compile=blocks compiles it too
    residual_dtype: torch.dtype | None  # of the hidden stream; None keeps what the embedding gives. Set by precision.

    def forward(self, batch: Batch, scale: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """(scaled, loss_sum, terms).

        scaled: scalar to call backward on: (sum of the loss over targets + auxiliary sums) * scale.
        loss_sum: scalar float32, detached: the sum of the cross-entropy over the targets, in nats.
        terms: named detached tensors that add up over micro-batches (for example "expert_load" [layers, experts]).
        """
        ...

    def after_update(self, terms: dict[str, Tensor], outcome: Outcome) -> None:
        """Once, after each update, skipped ones included: what the model itself does with what it has seen. All ranks
        call it, with their own terms, summed over the update's micro-batches. Must not wait for the device."""
        ...

    def logits(self, batch: Batch) -> Tensor:
        """[B, T, vocabulary], float32: logits_of(hidden_states(batch))."""
        ...

    def hidden_states(self, batch: Batch) -> Tensor:
        """[B, T, width]: what the last block gives."""
        ...

    def logits_of(self, hidden: Tensor) -> Tensor:
        """[..., width] -> [..., vocabulary], float32: norm and head, row by row."""
        ...

    def block_lists(self) -> list[nn.ModuleList]:
        """The stacks of equal blocks: what checkpointing wraps and compile=blocks compiles, one by one."""
        ...

    def decisions(self) -> frozenset[object]:
        """The operators of its blocks whose results recomputation must keep (see forge.decisions). None: empty."""
        ...

    def flops_per_token(self, sequence_length: int) -> float:
        """Floating-point operations of forward and backward, per token: 6 * active parameters in matmuls
        + 12 * layers * width * sequence_length (PaLM, appendix B; nanoGPT's convention)."""
        ...

    def forward_flops(self) -> Forward:
        """The same of one forward pass, term by term, from which all utilisation is reckoned."""
        ...


@runtime_checkable
class Model(Protocol):
    vocab_size: int

    def unused(self) -> dict[str, str]:
        """What cannot matter to this model: groups, each with the reason ("has no experts"); and settings of its own by
        their dotted names, each with what is to be said of it ("has no effect without ...")."""
        ...

    def build(self, parts: Parts) -> nn.Module:
        """A fresh `Trainable` on the default device, in float32. Raises ConfigError."""
        ...
