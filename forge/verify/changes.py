"""In which settings two configurations differ, and what such a difference is declared to change."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal

from omegaconf import DictConfig, OmegaConf

from forge.config import groups
from forge.schema import shown

Kind = Literal["nothing", "rounding", "update", "maths", "start"]
APART = ("run_dir", "resume", "choices")        # differ between any two runs


@dataclass(frozen=True)
class Change:
    """A setting, or a group whose option differs, with both values."""

    key: str
    before: Any
    after: Any

    @property
    def group(self) -> str:
        return self.key.partition(".")[0]

    def __str__(self) -> str:
        return f"{self.key} = {shown(self.before)} -> {shown(self.after)}"


def changes(baseline: DictConfig, candidate: DictConfig) -> list[Change]:
    """In the candidate's order. Where another option was chosen, its settings are no changes of their own; nor is what
    only follows another setting by interpolation."""
    before, after = (_container(settings) for settings in (baseline, candidate))
    chosen = [Change(group, before["choices"].get(group), option) for group, option in after["choices"].items()
              if group in groups() and before["choices"].get(group) != option]
    known = {change.key for change in chosen}
    old, new = (dict(_leaves({key: value for key, value in settings.items() if key not in {*known, *APART}}))
                for settings in (before, after))
    return chosen + [Change(key, old.get(key), new.get(key)) for key in {**new, **old} if old.get(key) != new.get(key)]


def kind_of(change: Change, declared: dict[str, Kind], by_user: Iterable[str]) -> Kind:
    """What the change is meant to change; "nothing" where no pattern speaks of it."""
    if any(fnmatchcase(change.key, pattern) for pattern in by_user):
        return "maths"
    return next((kind for pattern, kind in declared.items() if fnmatchcase(change.key, pattern)), "nothing")


def _container(settings: DictConfig) -> dict[str, Any]:
    return OmegaConf.to_container(settings, resolve=False)      # type: ignore[return-value]


def _leaves(node: dict[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in node.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, f"{path}{key}.")
        else:
            yield path + key, value
