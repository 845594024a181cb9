"""Some blocks, or some results in them, are computed again: a point between all the memory and all the work."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from forge.checkpointing import Repeats

if TYPE_CHECKING:
    from torch import nn

    from forge.config import Config


@dataclass(frozen=True)
class Selective:
    """every: of how many blocks one is recomputed; 1: each.

    save: results that are kept in recomputed blocks too, because they are dear to compute for the memory they take.
    """

    every: int
    save: list[Literal["matmul", "attention"]]

    def problems(self, config: Config) -> Iterator[str]:
        if self.every < 1:
            yield f"checkpointing.every={self.every}: at least 1 is wanted, which recomputes each block."

    def __call__(self, model: nn.Module) -> nn.Module:
        from forge.checkpointing.operators import FAMILIES
        from forge.checkpointing.recompute import recompute

        kept = frozenset(operator for family in self.save for operator in FAMILIES[family])
        return recompute(model, self.every, kept)

    def repeats(self, layers: int) -> Repeats:
        return Repeats(blocks=len(range(0, layers, self.every)), kept=tuple(self.save))
