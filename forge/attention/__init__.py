"""attention: how the tokens of a row look at each other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Layout:
    """Who may look at whom in a batch.

    documents: [B, T] int32, or None: tokens see only tokens with the same number.
    window: a token sees itself and the window - 1 before it; None: all before it.
    length: T. device: of the queries.
    """

    causal: bool
    documents: Tensor | None
    window: int | None
    length: int
    device: Any                 # torch.device


@dataclass(frozen=True)
class Executes:
    """What a kernel computes beyond what the model asks for. An option may state it as `executes`; hfu is null for
    those that do not.

    scores_again: backward computes the scores anew, since they were never stored.
    skips: which hidden pairs are not computed: none; those that causal hides, where no document or window hides more;
        or all.
    """

    scores_again: bool
    skips: Literal["none", "causal", "all"]


Plan = Any                      # what one attention option needs to know about a layout


@runtime_checkable
class Attention(Protocol):
    def plan(self, layout: Layout) -> Plan:
        """Once a batch, outside compiled code: masks, block masks, the choice of a kernel."""
        ...

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, plan: Plan, dropout: float) -> Tensor:
        """q, result: [B, heads, T, head_width]; k, v: [B, kv_heads, T, head_width], heads a multiple of kv_heads.

        Scores are scaled by head_width ** -0.5. dropout: the probability, 0 outside training. An option that states
        `narrow_values = True` takes narrower heads in v too, and the result is as wide as they are.
        """
        ...
