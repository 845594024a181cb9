"""Turn plain values into typed dataclasses, and say in the user's words what does not fit.

OmegaConf's structured configs would do most of this, but refuse `Literal` fields and nested frozen dataclasses, and
stop at the first mistake; here every mistake of a part is found in one pass.
"""

from __future__ import annotations

import dataclasses
import math
import types
from difflib import get_close_matches
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

_PLAIN = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}


def structure(schema: type, values: dict[str, Any], path: str, mistakes: list[str]) -> Any:
    """An instance of the dataclass `schema`; None, with sentences added to `mistakes`, where the values do not fit.

    path: the dotted name of the settings, for the sentences ("model.routing").
    """
    fields = {field.name for field in dataclasses.fields(schema)}
    hints = get_type_hints(schema)
    before = len(mistakes)
    mistakes += [_unknown(key, fields, path) for key in values if key not in fields]
    mistakes += [f"{_join(path, name)} is not set, and has no default: state it in the YAML of this option, "
                 f"or type it (a run that was frozen before this setting existed wants that)."
                 for name in sorted(fields - values.keys())]
    arguments = {name: convert(hints[name], values[name], _join(path, name), mistakes)
                 for name in fields & values.keys()}
    return schema(**arguments) if len(mistakes) == before else None


def convert(wanted: Any, value: Any, path: str, mistakes: list[str]) -> Any:
    """`value` as the annotation `wanted`: a plain type, Literal, optional, list[...], dict[str, ...] or dataclass."""
    origin = get_origin(wanted)
    if wanted is Any:
        return value
    if origin in (Union, types.UnionType):
        return _union(wanted, value, path, mistakes)
    if origin is Literal:
        return _literal(wanted, value, path, mistakes)
    if origin is list and isinstance(value, list):
        (inner,) = get_args(wanted)
        return [convert(inner, item, f"{path}[{index}]", mistakes) for index, item in enumerate(value)]
    if origin is dict and isinstance(value, dict):
        inner = get_args(wanted)[1]
        return {key: convert(inner, item, _join(path, key), mistakes) for key, item in value.items()}
    if dataclasses.is_dataclass(wanted) and isinstance(wanted, type) and isinstance(value, dict):
        return structure(wanted, value, path, mistakes)
    if wanted in _PLAIN:
        return _plain(wanted, value, path, mistakes)
    mistakes.append(f"{path}={value!r} does not fit: {_name(wanted)} is wanted.")
    return None


def _plain(wanted: type, value: Any, path: str, mistakes: list[str]) -> Any:
    if wanted is float and type(value) in (int, float) and math.isfinite(value):
        return float(value)
    if wanted is not float and type(value) is wanted:
        return value
    if wanted is int and type(value) is float and value.is_integer():
        return int(value)                                   # 1e6 is how people write a million
    if wanted is str and type(value) in (int, float):
        return str(value)
    finite = " that is finite" if type(value) is float else ""
    mistakes.append(f"{path}={_shown(value)}: {_PLAIN[wanted]}{finite if wanted is float else ''} is wanted.")
    return None


def _union(wanted: Any, value: Any, path: str, mistakes: list[str]) -> Any:
    options = [option for option in get_args(wanted) if option is not type(None)]
    if value is None and type(None) in get_args(wanted):
        return None
    attempts: list[list[str]] = []
    for option in options:
        attempts.append([])
        made = convert(option, value, path, attempts[-1])
        if not attempts[-1]:
            return made
    if len(options) > 1 and all(option in _PLAIN or get_origin(option) is Literal for option in options):
        attempts = [[f"{path}={_shown(value)}: {', or '.join(map(_name, options))} is wanted."]]
    closest: list[str] = min(attempts, key=len) if attempts else []
    mistakes += closest
    return None


def _literal(wanted: Any, value: Any, path: str, mistakes: list[str]) -> Any:
    choices = get_args(wanted)
    if value in choices:
        return value
    hint = did_you_mean(str(value), [str(choice) for choice in choices])
    mistakes.append(f"{path}={_shown(value)}: one of {', '.join(map(str, choices))} is wanted.{hint}")
    return None


def did_you_mean(word: str, known: list[str]) -> str:
    """' Did you mean 'x'?', or nothing where no known word is close."""
    close = get_close_matches(str(word), known, n=1)
    return f" Did you mean '{close[0]}'?" if close else ""


def _unknown(key: str, fields: set[str], path: str) -> str:
    known = sorted(fields)
    return (f"{_join(path, key)} is not a setting.{did_you_mean(key, known)} "
            f"Settings of {path or 'the run'}: {', '.join(known) or 'none'}.")


def shown(value: object) -> str:
    """A setting as YAML and the command line write it."""
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _shown(value: object) -> str:
    return repr(value) if isinstance(value, str) else shown(value)


def _name(wanted: Any) -> str:
    if get_origin(wanted) is Literal:
        return ", ".join(map(str, get_args(wanted)))
    return str(_PLAIN.get(wanted) or getattr(wanted, "__name__", wanted))


def _join(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key
