"""Which methods of a changed option were called at all: what was not called, a comparison shows nothing about."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from typing import Any, get_type_hints

from forge.config import Config, groups

# hardware is claimed before a job begins, batching collates in the reader's processes, and trackers are a list
NOT_WATCHED = ("hardware", "batching", "tracker")

Calls = dict[str, list[str]]                    # group -> the methods that were called


def watchable(changed: Iterable[str]) -> list[str]:
    """Those of the changed groups and settings whose options can be watched, once each."""
    known = [group for group in groups() if group not in NOT_WATCHED]
    return [group for group in dict.fromkeys(changed) if group in known]


def watched(config: Config, wanted: Collection[str]) -> tuple[Config, Calls]:
    """The configuration with options that note which methods of their group's protocol are called, and the notes."""
    calls: Calls = {group: [] for group in wanted}
    options = {group: _noting(getattr(config, group), methods_of(group), calls[group]) for group in wanted}
    return replace(config, **options), calls


def methods_of(group: str) -> list[str]:
    """Of the group's protocol."""
    protocol = get_type_hints(Config)[group]
    return [name for name, member in vars(protocol).items()
            if callable(member) and (name == "__call__" or not name.startswith("_"))]


def never_called(made: Iterable[Calls]) -> list[str]:
    """A sentence for each group of which a method was never called in any of the jobs."""
    seen: dict[str, set[str]] = {}
    for calls in made:
        for group, names in calls.items():
            seen.setdefault(group, set()).update(names)
    notes = []
    for group, called in seen.items():
        missing = [name for name in methods_of(group) if name not in called]
        if missing:
            what = " or ".join("it" if name == "__call__" else f"{name} of it" for name in missing)
            notes.append(f"{group}: this model never calls {what}, so nothing is shown about that part.")
    return notes


def _noting(option: Any, methods: list[str], calls: list[str]) -> Any:
    """A copy of the option, of a class below its own, so that whoever asks what it is gets the same answer."""
    own = type(option)
    members: dict[str, Any] = {name: _method(own, name, calls) for name in methods if hasattr(own, name)}
    members |= {"__slots__": (), "__deepcopy__": lambda self, memo: self,
                "__reduce__": lambda self: (_plain, (own, dict(vars(self)))), "__module__": own.__module__}
    made = copy.copy(option)
    object.__setattr__(made, "__class__", type(own.__name__, (own,), members))
    return made


def _method(own: type, name: str, calls: list[str]) -> Callable[..., Any]:
    def method(self: Any, *given: Any, **named: Any) -> Any:
        if name not in calls:
            calls.append(name)
        return getattr(own, name)(self, *given, **named)

    return method


def _plain(own: Any, values: dict[str, Any]) -> Any:
    """In another process nobody looks on."""
    made = own.__new__(own)
    vars(made).update(values)
    return made
