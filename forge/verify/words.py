"""Which words of the command line say what: the candidate, the baseline, and the comparison itself."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from forge.command_line import FOLDERS
from forge.composition import own_settings
from forge.errors import ConfigError
from forge.words import OWN, packages


@dataclass(frozen=True)
class Words:
    """candidate, baseline: training overrides. shared: words that both have: from= and flags.

    verify: overrides of the comparison. declared: settings that the user declares to change the maths.
    """

    candidate: list[str]
    baseline: list[str]
    shared: list[str]
    verify: list[str]
    declared: list[str]
    folders: list[str]
    allowed: tuple[str, ...]
    run_dir: Path

    @classmethod
    def of(cls, arguments: list[str]) -> Words:
        """Raises ConfigError."""
        own: dict[str, str] = {}
        candidate, shared, verify, folders = [], [], [], []
        rest = iter(arguments)
        for word in rest:
            key, _, value = word.partition("=")
            name = key.lstrip("+~")
            if key in FOLDERS:
                folders.append(value or next(rest, ""))
            elif word.startswith("-"):
                raise ConfigError(f"{word}: forge.verify takes --config-dir FOLDER, --json and --help, and no other "
                                  f"flag.")
            elif name in ("baseline", "declared", "run_dir"):
                own[name] = value
            elif name in OWN:
                own[name] = value
                shared.append(word)
            elif name == "verify.declared":
                raise ConfigError(f"{word}: verify.declared is a table of conf/verify. On the line, declared=SETTING,"
                                  f"... names settings that are meant to change the maths.")
            elif name == "verify" or name.startswith("verify."):
                verify.append(word)
            else:
                candidate.append(word)
        if "resume" in own:
            raise ConfigError("resume= goes on with a run, and forge.verify trains none: take from= for its settings.")
        return cls(candidate, _split(own.get("baseline", "")), [*_flags(folders), *shared], verify,
                   re.findall(r"[\w.*]+", own.get("declared", "")), folders, packages(own), _run_dir(own))


def settings(words: Words) -> dict[str, Any]:
    """The values of the verify group, as Hydra composes them. Raises ConfigError."""
    return own_settings("verify", "verify", words.verify, words.folders)


def _split(text: str) -> list[str]:
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise ConfigError(f"baseline={text}: {error}.") from None
    for word in words:
        name = word.partition("=")[0].lstrip("+~")
        if word.startswith("-") or name.partition(".")[0] in (*OWN, "baseline", "declared", "run_dir", "verify"):
            raise ConfigError(f"baseline: {word} is said once, outside of baseline='...', for both sides.")
    return words


def _flags(folders: list[str]) -> list[str]:
    if "" in folders or len(folders) > 1:
        raise ConfigError("--config-dir wants one folder.")
    return [flag for folder in folders for flag in ("--config-dir", folder)]


def _run_dir(own: dict[str, str]) -> Path:
    if own.get("run_dir") == "":
        raise ConfigError("run_dir names no folder: name one, or leave run_dir= out, and one is made in runs/.")
    return Path(own.get("run_dir") or f"runs/verify_{datetime.now():%Y-%m-%d_%H-%M-%S}").absolute()
