"""checkpointing: which forward results are kept for backward, and which are computed again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class Repeats:
    """What backward computes a second time. An option may state it as a method, `repeats(layers) -> Repeats`; hfu is
    null for those that do not.

    blocks: how many of the model's blocks run forward twice. kept: families of operators whose results they keep.
    """

    blocks: int
    kept: tuple[str, ...]


@runtime_checkable
class Checkpointing(Protocol):
    def __call__(self, model: nn.Module) -> nn.Module:
        """The model computes the same bits, in less memory. Names of parameters stay."""
        ...
