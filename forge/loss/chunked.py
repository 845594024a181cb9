"""loss=chunked: the logits of a few rows at a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from forge.loss.limits import positive

if TYPE_CHECKING:
    from torch import Tensor

    from forge.config import Config


@dataclass(frozen=True)
class Chunked:
    """Keeps no logits: each chunk's are computed in forward, thrown away, and computed again in backward.

    chunk_tokens: rows whose logits exist at the same time. The head's matrix product is done twice in forward terms:
        2 * width * vocabulary more operations a token. pad_to: as in plain.
    """

    chunk_tokens: int
    pad_to: int
    head_products: ClassVar[int] = 4    # the logits twice

    def __call__(self, hidden: Tensor, head_weight: Tensor, targets: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        from forge.loss.cross_entropy import chunked_cross_entropy_sum

        total = chunked_cross_entropy_sum(hidden, head_weight, targets, self.pad_to, self.chunk_tokens)
        return total * scale, total.detach()

    def problems(self, config: Config) -> Iterator[str]:
        yield from positive("chunk_tokens", self.chunk_tokens)
        yield from positive("pad_to", self.pad_to)
