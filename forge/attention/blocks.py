"""flex_attention and the block masks it is told by."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from forge.attention.heads import compute_dtype
from forge.attention.mask import hides_nothing

if TYPE_CHECKING:
    from forge.attention import Layout

MayLook = Callable[[Any, Any, Any, Any], Any]       # (batch, head, row, column) -> bool, all index tensors


def attend_blocks(q: Tensor, k: Tensor, v: Tensor, mask: BlockMask | None) -> Tensor:
    """See forge.attention.Attention. mask: None: everyone looks at everyone."""
    dtype = compute_dtype(q)                        # autocast does not reach into flex_attention
    attend = flex_attention if torch.compiler.is_compiling() else _compiled(flex_attention)
    out: Tensor = attend(q.to(dtype), k.to(dtype), v.to(dtype), block_mask=mask, enable_gqa=True)
    return out


def block_mask(layout: Layout) -> BlockMask | None:
    """Which blocks of 128 x 128 pairs hold anything to see, and which are full."""
    if hides_nothing(layout):
        return None
    if layout.documents is None:
        return _same_for_all(layout.causal, layout.window, layout.length, layout.device)
    rule = may_look(layout.causal, layout.window, layout.documents)
    made: BlockMask = _compiled(create_block_mask)(
        rule, len(layout.documents), None, layout.length, layout.length, device=str(layout.device))
    return made


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


@lru_cache(maxsize=16)      # lengths of training, evaluation and sampling: each batch of a length has the same mask
def _same_for_all(causal: bool, window: int | None, length: int, device: torch.device) -> BlockMask:
    return create_block_mask(may_look(causal, window, None), None, None, length, length, device=str(device))


@cache
def _compiled(function: Any) -> Any:
    """Uncompiled, either function would hold the whole table of scores or of the mask in memory."""
    return torch.compile(function)
