"""What the settings that optimizers share must keep to."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from forge.optimizer import Group


class Shared(Protocol):
    @property
    def lr(self) -> float: ...
    @property
    def weight_decay(self) -> float: ...
    @property
    def clip(self) -> float | None: ...
    @property
    def max_skipped(self) -> int: ...
    @property
    def groups(self) -> list[Group]: ...


def shared_problems(settings: Shared) -> Iterator[str]:
    """A sentence for each setting that lies outside its range."""
    yield from positive("lr", settings.lr)
    if not settings.weight_decay >= 0:
        yield f"optimizer.weight_decay={settings.weight_decay}: 0 or more is wanted."
    if settings.clip is not None and not settings.clip > 0:
        yield f"optimizer.clip={settings.clip}: more than 0 is wanted, or null for no clipping."
    if settings.max_skipped < 0:
        yield f"optimizer.max_skipped={settings.max_skipped}: 0 or more is wanted."
    for index, group in enumerate(settings.groups):
        if not group.lr_scale >= 0:
            yield f"optimizer.groups[{index}].lr_scale={group.lr_scale}: 0 or more is wanted."


def positive(name: str, value: float) -> Iterator[str]:
    if not 0 < value < float("inf"):
        yield f"optimizer.{name}={value}: more than 0 is wanted."


def fraction(name: str, value: float) -> Iterator[str]:
    if not 0 <= value < 1:
        yield f"optimizer.{name}={value}: at least 0 and less than 1 is wanted."
