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
    position = torch.arange(layout.length, device=layout.device)
    back = position[:, None] - position[None, :]            # how far behind the row the column lies
    allowed = back >= 0 if layout.causal else torch.ones_like(back, dtype=torch.bool)
    if layout.window is not None:
        allowed = allowed & (back.abs() < layout.window)
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
