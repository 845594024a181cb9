"""checkpointing: which forward results are kept for backward, and which are computed again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    from torch import nn


@runtime_checkable
class Checkpointing(Protocol):
    def __call__(self, model: nn.Module) -> nn.Module:
        """The model computes the same bits, in less memory. Names of parameters stay."""
        ...
