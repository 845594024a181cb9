"""compile: how much of the model is one compiled graph."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    from torch import nn


@runtime_checkable
class Compile(Protocol):
    def __call__(self, model: nn.Module) -> nn.Module:
        """The model computes the same within rounding. Names of parameters stay."""
        ...
