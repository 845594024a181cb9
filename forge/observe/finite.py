"""Infinity, and what is no number: where it is, and how JSON, which has no word for it, is given it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any


def finite(value: Any, otherwise: Callable[[float], Any] = lambda number: None) -> Any:
    """The value, with what `otherwise` makes of every float in it that is not finite: null, where nothing is said.

    str keeps inf and nan apart from null where null stands for what was not measured.
    """
    if isinstance(value, dict):
        return {str(key): finite(item, otherwise) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item, otherwise) for item in value]
    return otherwise(value) if isinstance(value, float) and not math.isfinite(value) else value
