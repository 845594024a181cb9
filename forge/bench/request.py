"""What the user typed: which bench with which settings, where the record goes, and the words of the baseline."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from forge.bench import Bench
from forge.bench.trial import words_of
from forge.command_line import FOLDERS, config_dirs
from forge.composition import own_settings
from forge.config import conf_dir, option_of
from forge.errors import ConfigError
from forge.schema import did_you_mean
from forge.words import packages, split

LISTS = ("bench.switches", "bench.path")       # of strings of training words


@dataclass(frozen=True)
class Request:
    """option: its name in conf/bench. settings: of the option. words: everything that is not the command's own.

    on_stdout: --json, result.json instead of a table.
    """

    option: str
    bench: Bench
    settings: dict[str, Any]
    run_dir: Path
    words: list[str]
    allowed: tuple[str, ...]
    on_stdout: bool

    @classmethod
    def parse(cls, arguments: list[str]) -> Request:
        """Raises ConfigError."""
        own, _ = split(arguments)
        if "resume" in own:
            raise ConfigError(f"resume={own['resume']}: a bench starts its arms afresh. Take their settings from a run "
                              f"with from={own['resume']}")
        mine = [word for word in arguments if re.match(r"\+?bench(\.|=)", word)]
        _check_shapes(mine)
        places = [word for word in arguments if word.startswith("run_dir=")]
        if places and places[-1].partition("=")[2].strip() in ("", "null", "''", '""'):
            raise ConfigError("run_dir names no folder: name one, or leave run_dir= out, and one is made in runs/.")
        words = [word for word in arguments if word not in [*mine, *places, "--json"]]
        _check_flags(words)
        chosen = [word.partition("=")[2] for word in mine if word.lstrip("+").startswith("bench=")]
        option = chosen[-1] if chosen else "ablation"
        allowed = packages(own)
        settings = _settings(option, [word for word in mine if word.startswith("bench.")], words)
        bench = option_of("bench", Bench, settings, allowed)
        mistakes = list(getattr(bench, "problems", lambda: ())())
        if mistakes:
            raise ConfigError("\n".join(mistakes))
        run_dir = Path(places[-1].partition("=")[2]) if places else Path(time.strftime("runs/bench_%Y-%m-%d_%H-%M-%S"))
        return cls(option, bench, settings, run_dir.absolute(), words, allowed, "--json" in arguments)


def _check_shapes(words: list[str]) -> None:
    """Raises ConfigError for a list that is none and a part that is no setting: Hydra's words name neither."""
    for word in words:
        name, _, value = word.partition("=")
        if name in LISTS and not (value.startswith("[") and value.endswith("]") and _cut(value[1:-1]) is not None):
            example = value if re.fullmatch(r"[\w.]+=[\w./]+", value) else "compile=blocks"
            raise ConfigError(f"{word} is no list: write '{name}=[...]', as in '{name}=[{example}]', with every quote "
                              f"and bracket closed.")
        if name == "bench.timing":
            raise ConfigError(f"{word}: its parts are settings of their own, as in bench.timing.blocks=8.")


def _check_flags(words: list[str]) -> None:
    for before, word in pairwise(["", *words]):
        if word.startswith("-") and not word.startswith(("--config-dir=", "-cd=")) and word not in FOLDERS:
            raise ConfigError(f"{word} is not a flag of this command: --config-dir FOLDER and --json are.")
        if "=" not in word and not word.startswith(("-", "~")) and before not in FOLDERS:
            words_of(word)      # says what is wanted


def _settings(option: str, overrides: list[str], words: list[str]) -> dict[str, Any]:
    """The values of conf/bench/<option>.yaml, with what was typed on top."""
    folders = config_dirs(words)
    known = [path.stem for folder in [conf_dir(), *folders] for path in Path(folder, "bench").glob("*.yaml")]
    if option not in known:
        raise ConfigError(f"bench={option} is not an option.{did_you_mean(option, known)} "
                          f"Options: {', '.join(sorted(known))}.")
    return own_settings("bench", "bench", [f"bench={option}", *map(quoted, overrides)], folders,
                        f" of bench={option}")


def quoted(word: str) -> str:
    """A list of training words, as Hydra's grammar wants it: its items hold signs that mean something to Hydra."""
    setting, _, value = word.partition("=")
    if not (value.startswith("[") and value.endswith("]") and "=" in value):
        return word
    items = _cut(value[1:-1])
    return word if items is None else f"{setting}=[{','.join(_as_text(item.strip()) for item in items)}]"


def _as_text(item: str) -> str:
    if len(item) > 1 and item[0] in "'\"" and item[-1] == item[0]:
        item = item[1:-1]
    escaped = item.replace("'", "\\'")
    return f"'{escaped}'"


def _cut(listed: str) -> list[str] | None:
    """At the commas that are outside of quotes and brackets; None where one of those is not closed."""
    items, depth, quote = [""], 0, ""
    for sign in listed:
        if quote:
            quote = "" if sign == quote else quote
        elif sign in "'\"":
            quote = sign
        depth += (sign in "[{(") - (sign in "]})") if not quote else 0
        if depth < 0:
            return None
        if sign == "," and not quote and depth == 0:
            items.append("")
        else:
            items[-1] += sign
    return None if quote or depth else items
