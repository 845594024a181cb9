"""A configuration to be measured: composed as forge.train composes it, and checked before anything runs."""

from __future__ import annotations

import copy
import re
import shlex
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from forge.composition import training_settings
from forge.config import Config, check, realise
from forge.errors import ConfigError
from forge.freeze import freeze
from forge.words import OWN

# An arm is measured without what happens beside training, and its schedule never ends.
QUIET = {"evaluation": "evaluation=none", "snapshot": "snapshot=none", "tracker": "tracker=[]",
         "steps": "steps=1000000"}
NOT_A_SWITCH = (*OWN, "run_dir", "hydra", "bench")      # said once, for the whole bench, or not at all


@dataclass(frozen=True)
class Trial:
    """words: of the whole configuration. problem: why its parts do not fit together, or None."""

    name: str
    words: list[str]
    folder: Path
    settings: DictConfig
    config: Config
    problem: str | None

    def freeze(self) -> None:
        """Once: an arm that is started again starts from the same file."""
        if not (self.folder / "config.yaml").exists():
            freeze(self.settings, self.folder)

    def record(self) -> dict[str, Any]:
        """Interpolations stay literal, so that no secret is written."""
        config: Any = OmegaConf.to_container(self.settings, resolve=False)
        return {"words": self.words, "folder": str(self.folder), "config": config}

    def same_as(self, other: Trial) -> bool:
        """Whether the two are one configuration, in other words or not."""
        return self._parts() == other._parts()

    def _parts(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self.config).items() if name not in ("run_dir", "choices")}


@dataclass
class Composer:
    """Makes trials out of the words of the baseline and those of switches.

    words: the baseline's, with Hydra's flags and the words that are consumed before composition. quiet: see QUIET.
    """

    words: list[str]
    allowed: tuple[str, ...]
    run_dir: Path
    made: int = 0
    _known: dict[tuple[str, ...], DictConfig] = field(default_factory=dict)

    def trial(self, name: str, *switches: str, quiet: dict[str, str] | None = None) -> Trial:
        """The baseline with these switches, each a string of words; later words take the place of earlier ones.

        Raises ConfigError for what cannot be composed; parts that do not fit together become the trial's problem.
        """
        words = self.words
        for switch in switches:
            words = merged(words, words_of(switch))
        beside = [word for group, word in (QUIET if quiet is None else quiet).items()
                  if not any(key(mine).partition(".")[0] == group for mine in words)]
        folder = self.run_dir / "arms" / f"{self.made:02d}_{_plain(name)}"
        self.made += 1
        line = (*beside, *words)
        if line not in self._known:         # Hydra takes a quarter of a second for each
            self._known[line] = training_settings([*line, f"run_dir={folder}"])
        settings = copy.deepcopy(self._known[line])
        settings.run_dir = str(folder)
        config = realise(settings, self.allowed)
        try:
            check(config)
        except ConfigError as error:
            return Trial(name, words, folder, settings, config, str(error))
        return Trial(name, words, folder, settings, config, None)


def switched(composer: Composer, setting: str, name: str, switch: str) -> Trial:
    """The trial of one item of bench.switches or bench.path. Raises ConfigError, which names `setting`, where the
    switch is wrong whatever the baseline is."""
    try:
        trial = composer.trial(name, switch)
    except ConfigError as error:
        raise ConfigError(f"{setting}: {switch or 'an item'}: {error}") from None
    wrong = [said for said in (trial.problem or "").splitlines() if _wrong_by_itself(said, words_of(switch))]
    if wrong:
        raise ConfigError(f"{setting}: {switch}: {wrong[0]}")
    return trial


def _wrong_by_itself(problem: str, words: list[str]) -> bool:
    """A value that no configuration takes. A complaint about one says only what is wanted (`steps=0: at least 1 is
    wanted`); one about two parts names the other."""
    return any(re.match(rf"{re.escape(key(word))}=[^\s:]*: .*\bwanted\b", problem) for word in words)


def words_of(switch: str) -> list[str]:
    """The training overrides in one string. Raises ConfigError."""
    try:
        words = shlex.split(switch)
    except ValueError as error:
        raise ConfigError(f"{switch}: {error}.") from None
    if not words:
        raise ConfigError(f"{switch!r} holds no words: SETTING=VALUE or GROUP=OPTION is wanted.")
    for word in words:
        if word.startswith("-"):
            raise ConfigError(f"{word} is a flag, and a switch holds training settings only.")
        if re.split(r"[./@]", key(word))[0] in NOT_A_SWITCH:
            raise ConfigError(f"{word} is no training setting, and a switch holds nothing else.")
        if "=" not in word and not word.startswith("~"):
            raise ConfigError(f"{word!r} is not an override: SETTING=VALUE or GROUP=OPTION is wanted.")
    return words


def merged(words: list[str], more: list[str]) -> list[str]:
    """`words`, without those that `more` sets again, and then `more`."""
    again = {key(word) for word in more}
    return [word for word in words if "=" not in word or word.startswith("-") or key(word) not in again] + more


def key(word: str) -> str:
    return word.partition("=")[0].lstrip("+~")


def _plain(name: str) -> str:
    """Fit for a folder."""
    return "".join(sign if sign.isalnum() else "_" for sign in name)[:40].strip("_")
