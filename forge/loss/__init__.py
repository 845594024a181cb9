"""loss: how hidden states become the cross-entropy of the next token."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    from torch import Tensor


@runtime_checkable
class Loss(Protocol):
    def __call__(self, hidden: Tensor, head_weight: Tensor, targets: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        """hidden [N, width], head_weight [vocabulary, width], targets [N] (IGNORED: not counted), scale scalar.

        Returns (sum * scale, sum): the sum over targets of the cross-entropy in nats, float32; the second detached.
        """
        ...
