"""What the settings of every schedule must keep to, in the user's words."""

from __future__ import annotations

from collections.abc import Iterator


def problems_of(warmup: int, floor: float = 0.0) -> Iterator[str]:
    """A sentence for each setting that makes no sense."""
    if warmup < 0:
        yield f"schedule.warmup={warmup}: 0 or more updates are wanted."
    if not 0 <= floor <= 1:
        yield f"schedule.floor={floor}: a factor between 0 and 1 is wanted."
