"""Operators that decide something, such as where a token goes. What was decided is kept, and never decided again.

Recomputation (checkpointing) repeats forward to get back what was not kept. A decision that came out differently the
second time, because what it looks at has moved on, would give gradients of another function than the one that was
evaluated. So every option of checkpointing keeps the results of these operators, of a model that says that it decides.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._library.custom_ops import CustomOpDef

DECISIONS: set[Any] = set()     # as PyTorch's dispatcher sees them; filled by the modules that decide, at their import


def decision(name: str) -> Callable[[Callable[..., Any]], CustomOpDef]:
    """Make a function of tensors the operator forge::<name>, whose results are kept. It has no gradient but one that
    it registers."""
    def make(function: Callable[..., Any]) -> CustomOpDef:
        operator: CustomOpDef = torch.library.custom_op(f"forge::{name}", mutates_args=())(function)
        DECISIONS.add(getattr(torch.ops.forge, name).default)
        return operator

    return make
