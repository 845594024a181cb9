"""FlexAttention: blocks of the score table that a mask hides are never computed (PyTorch flex_attention)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from forge.attention.heads import compute_dtype
from forge.attention.kernels import PLAIN, of_model, on_gpu
from forge.attention.mask import hides_nothing
from forge.attention.sdpa import Choice
from forge.notes import say

if TYPE_CHECKING:
    from torch import Tensor

    from forge.attention import Layout
    from forge.config import Config

MayLook = Callable[[Any, Any, Any, Any], Any]       # (batch, head, row, column) -> bool, all index tensors


@dataclass(frozen=True)
class Flex:
    """The kernel that skips what documents and windows hide. A CPU has no backward for it: masked sdpa there."""

    def problems(self, config: Config) -> Iterator[str]:
        if on_gpu(config) and of_model(config, "dropout"):
            yield (f"attention=flex knows no dropout, and model.dropout is {of_model(config, 'dropout')}: "
                   f"set model.dropout=0 or attention=sdpa.")

    def plan(self, layout: Layout) -> BlockMask | Choice | None:
        if layout.device.type != "cuda":
            say("attention=flex has no backward pass on a CPU: this run takes sdpa with a mask.")
            return PLAIN.plan(layout)
        if hides_nothing(layout):
            return None
        if layout.documents is None:
            return _same_for_all(layout.causal, layout.window, layout.length, layout.device)
        return block_mask(may_look(layout.causal, layout.window, layout.documents), layout)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, plan: BlockMask | Choice | None, dropout: float) -> Tensor:
        if isinstance(plan, Choice):
            return PLAIN(q, k, v, plan, dropout)
        dtype = compute_dtype(q)                    # autocast does not reach into flex_attention
        attend = flex_attention if torch.compiler.is_compiling() else _compiled(flex_attention)
        out: Tensor = attend(q.to(dtype), k.to(dtype), v.to(dtype), block_mask=plan, enable_gqa=True)
        return out


def may_look(causal: bool, window: int | None, documents: Tensor | None) -> MayLook:
    """The rule of forge.attention.mask.mask, one pair of tokens at a time. documents: [B, T]."""
    def rule(batch: Any, head: Any, row: Any, column: Any) -> Any:
        back = row - column
        allowed = back >= 0 if causal else back == back
        if window is not None:
            allowed = allowed & (back < window) & (back > -window)
        if documents is not None:
            allowed = allowed & (documents[batch, row] == documents[batch, column])
        return allowed

    return rule


def block_mask(rule: MayLook, layout: Layout) -> BlockMask:
    """Which 128 x 128 blocks hold anything to see, and which are full."""
    rows = None if layout.documents is None else layout.documents.shape[0]
    made: BlockMask = _compiled(create_block_mask)(
        rule, rows, None, layout.length, layout.length, device=str(layout.device))
    return made


@lru_cache(maxsize=16)      # training and evaluation lengths; each batch has the same mask
def _same_for_all(causal: bool, window: int | None, length: int, device: torch.device) -> BlockMask:
    made: BlockMask = create_block_mask(may_look(causal, window, None), None, None, length, length, device=str(device))
    return made


@cache
def _compiled(function: Any) -> Any:
    """Uncompiled, both functions would hold the whole table of scores or of the mask in memory."""
    return torch.compile(function)
