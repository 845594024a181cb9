"""Who may look at whom, as a table of yes and no: what every option means, and what those without a kernel use."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from forge.attention import Layout


def mask(layout: Layout) -> Tensor | None:
    """[B or 1, 1, T, T] bool: True where the row's token may look at the column's. None: everyone at everyone.

    Without causal, a window reaches as far ahead as it reaches back.
    """
    if hides_nothing(layout):
        return None
    return _and_documents(_by_position(layout.causal, layout.window, layout.length, layout.device), layout)


_STORED: dict[tuple[bool, int | None, torch.device], Tensor] = {}


def stored_mask(layout: Layout) -> Tensor | None:
    """The same, cut out of a table that is kept for as long as the process lives. It grows to the longest row."""
    if hides_nothing(layout):
        return None
    key = (layout.causal, layout.window, layout.device)
    if key not in _STORED or len(_STORED[key]) < layout.length:
        _STORED[key] = _by_position(*key[:2], layout.length, layout.device)
    return _and_documents(_STORED[key][:layout.length, :layout.length], layout)


def _by_position(causal: bool, window: int | None, length: int, device: torch.device) -> Tensor:
    """[T, T] bool."""
    position = torch.arange(length, device=device)
    back = position[:, None] - position[None, :]            # how far behind the row the column lies
    allowed = back >= 0 if causal else torch.ones_like(back, dtype=torch.bool)
    return allowed if window is None else allowed & (back.abs() < window)


def _and_documents(allowed: Tensor, layout: Layout) -> Tensor:
    """[B or 1, 1, T, T] from [T, T]."""
    allowed = allowed[None, None]
    if layout.documents is not None:
        documents = layout.documents[:, None]
        allowed = allowed & (documents[..., :, None] == documents[..., None, :])
    return allowed


def hides_nothing(layout: Layout) -> bool:
    return not layout.causal and is_plain(layout)


def is_plain(layout: Layout) -> bool:
    """Nothing is hidden beyond what causal hides: the case that every kernel knows."""
    return layout.documents is None and layout.window is None
