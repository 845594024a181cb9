"""What the user typed for a training run: where it starts from, and what Hydra composes on top."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import reduce
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra import compose, initialize_config_dir
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from forge.config import conf_dir, groups, read_yaml
from forge.errors import ConfigError, UnusableEnvironment
from forge.schema import did_you_mean
from forge.snapshot.folder import read_manifest, run_of, whole_snapshots
from forge.words import packages, split

if TYPE_CHECKING:
    from forge.config import Config

FOLDERS = ("--config-dir", "-cd")       # flags that name a folder of options beside conf/


@dataclass(frozen=True)
class CommandLine:
    """A parsed command line.

    base: the run directory whose configuration is the starting point, or None: conf/train.yaml is.
    snapshot: what the run goes on from, or None: a fresh start.
    allowed: packages beside forge whose classes options may name.
    overrides: the settings and options that were typed. arguments: what Hydra gets: its flags, which it wants first,
        the choices of `base`, and the overrides.
    """

    base: Path | None
    snapshot: Path | None
    allowed: tuple[str, ...]
    overrides: list[str]
    arguments: list[str]

    @classmethod
    def parse(cls, arguments: list[str]) -> CommandLine:
        own, rest = split(arguments)
        if "from" in own and "resume" in own:
            raise ConfigError("from= starts a run again and resume= goes on with one: give one of them.")
        named = own.get("resume", own.get("from"))
        if named == "":
            raise ConfigError("from= and resume= want a run directory, and nothing is named.")
        place = Path(named) if named else None
        try:
            base = run_of(place) if place else None
        except ConfigError as error:
            raise ConfigError(f"{'resume' if 'resume' in own else 'from'}={error}") from None
        allowed = packages(own)
        overrides = [word for word in rest if word.startswith("~") or ("=" in word and not word.startswith("-"))]
        for word in overrides:
            if word.startswith("+experiment="):
                raise ConfigError(f"{word}: write it without the plus, {word[1:]}")
            if _key(word) in (*groups(), "experiment") and _key(word) != "tracker" and _value(word).startswith("["):
                raise ConfigError(f"{word}: a group takes one option; only tracker takes a list.")
            if _key(word) in (*groups(), "experiment") and _value(word) in ("null", "None", "~"):
                raise ConfigError(f"{word}: the name of an option is wanted (python -m forge.train --help lists them); "
                                  f"leave the word out for the default.")
        if base and any(_key(word) == "experiment" for word in overrides):
            raise ConfigError("from= and resume= start from a run's own settings, and experiment= from others: give "
                              "one of them.")
        flags = [word for word in rest if word not in overrides]
        if "resume" in own and {"-m", "--multirun"} & set(flags):
            raise ConfigError("resume= goes on with one run, and -m makes several: sweep with from= instead.")
        snapshot = _snapshot_of(place, overrides) if place and "resume" in own else None
        choices = choices_of(base, overrides, config_dirs(flags)) if base else []
        return cls(base, snapshot, allowed, overrides, flags + choices + overrides)

    def compose(self, job: Callable[[], Any]) -> None:
        """Let Hydra compose and call the job. What Hydra refuses becomes a ConfigError in one sentence."""
        sys.argv[1:] = self.arguments
        os.environ["HYDRA_FULL_ERROR"] = "1"        # or Hydra prints the error itself and exits with 1
        try:
            job()
        except (HydraException, OmegaConfBaseException, YAMLError) as error:
            raise ConfigError(in_a_sentence(error)) from None
        except ValueError as error:                 # of an option that is null or a number; it does not say which
            raise ConfigError(f"{in_a_sentence(error)}: {' '.join(self.overrides)}") from None
        except OSError as error:
            raise UnusableEnvironment(f"{error.filename} cannot be used: {error.strerror}.") from None

    def settle(self, composed: DictConfig) -> tuple[DictConfig, Path]:
        """(the settings to freeze, the run directory). Interpolations stay literal, so no secret is written."""
        context = HydraConfig.get()
        run_dir = Path(context.runtime.output_dir)
        if context.mode is RunMode.RUN:
            run_dir = _named_folder(composed)
        settings = OmegaConf.create(OmegaConf.to_container(composed, resolve=False))
        assert isinstance(settings, DictConfig)
        settings.choices = choices_in(context.runtime.choices, settings)
        typed = typed_words()
        if self.base:
            mine = {_key(word) for word in self.overrides}
            settings = onto(self.base, settings, [word for word in typed if _key(word) in mine])
        settings.resume = str(self.snapshot) if self.snapshot else None
        if self.base and self.snapshot and not any(word.startswith("run_dir=") for word in typed):
            run_dir = self.base
        settings.run_dir = str(run_dir.absolute())
        return settings, run_dir.absolute()

    def check_ahead(self, config: Config) -> None:
        """Raises ConfigError where a resumed run has nothing left to do."""
        done = read_manifest(self.snapshot)["step"] if self.snapshot else -1
        if done >= config.last_step:
            raise ConfigError(f"resume={self.base}: the run is at step {done} already, and steps={config.steps}, "
                              f"stop_at={config.stop_at} end it there. Raise them to go on.")

    def went_no_further(self) -> bool:
        """Whether a resumed run has no snapshot behind the one that it went on from."""
        found = whole_snapshots(self.base) if self.base else []
        return bool(found) and found[-1].absolute() == self.snapshot

    def note_unused(self, config: Config) -> None:
        """Say which options and settings were asked for that the model has no use for."""
        typed = {_key(word): _value(word) for word in self.overrides}
        groups = {key.partition(".")[0] for key in typed}
        for name, reason in config.model.unused().items():
            if name in typed and "." in name:
                print(f"forge: {name}={typed[name]} {reason}.", file=sys.stderr)
            elif name in groups:
                print(f"forge: {name}={config.choices.get(name)} is not used: model={config.choices.get('model')} "
                      f"{reason}.", file=sys.stderr)


def choices_in(made: Any, settings: DictConfig) -> dict[str, Any]:
    """The option of each group, out of what Hydra recorded; of a list group, the options."""
    found = {group: option for group, option in made.items() if not group.startswith("hydra/") and option is not None}
    return found | {"tracker": [name for name in settings.get("tracker", {}) if name != "every"]}


def typed_words() -> list[str]:
    """The overrides of this run, as Hydra got them: their interpolations stay literal."""
    words = OmegaConf.to_container(HydraConfig.get().overrides.task, resolve=False)
    assert isinstance(words, list)
    return [str(word) for word in words]


def refused_key(error: Exception) -> str | None:
    """The setting or group that Hydra could not override, for there is none of that name; None for other errors."""
    key = re.search(r"Could not override '([^'@]+)", str(error))
    return key.group(1) if key else None


def in_a_sentence(error: Exception) -> str:
    """What Hydra says about a line it cannot compose, without its search path and internal names."""
    message = str(error)
    key = refused_key(error)
    option = re.search(r"Could not find '(\w+)/(.*?)'.*Available options in '\w+':\s*(.*?)\s*Config search path",
                       message, re.DOTALL)
    if option is not None:
        group, wrong, available = option.group(1), option.group(2), re.findall(r"\w+", option.group(3))
        if group == "experiment":
            available = list(dict.fromkeys([*experiments(), *available]))
        return f"{group}={wrong} is not an option.{did_you_mean(wrong, available)} Options: {', '.join(available)}."
    if key is None and "hydra.cc/docs" in message:      # its grammar's own words mean nothing to a reader
        said = message.splitlines()[0]
        word = re.search(r"override '([^'=]*)'", said)
        if word is not None:
            return f"{word.group(1)!r}: SETTING=VALUE or GROUP=OPTION is wanted."
        said = re.sub(r"^\w+Exception: (.*)", r"\1 has signs that mean something else here", said)
        return f"{said}. Quote a value with spaces, commas or other signs: 'key=\"value\"'."
    if key is None:
        noise = ("full_key:", "object_type=", "reference_type=", "To append", "Config search path")
        lines = [line.strip() for line in message.splitlines()]
        return " ".join(line for line in lines if line and not line.startswith((*noise, "provider=")))
    if key in _known_keys():
        return (f"{key}: the value names settings that {key} does not have here. To put others in their place, "
                f"write '~{key}' and '+{key}=VALUE'.")
    return (f"{key} is not a setting.{did_you_mean(key, _known_keys())} "
            f"(python -m forge.train --help lists the groups; --cfg job prints every setting.)")


def _named_folder(composed: DictConfig) -> Path:
    try:
        named = composed.run_dir
    except OmegaConfBaseException as error:
        raise ConfigError(f"run_dir: {in_a_sentence(error)}") from None
    if named in (None, ""):
        raise ConfigError("run_dir names no folder: name one, or leave run_dir= out, and one is made in runs/.")
    return Path(str(named))


def config_dirs(words: list[str]) -> list[str]:
    """The folders of options beside conf/ that a line names."""
    joined = [word.partition("=")[2] for word in words if word.startswith(tuple(f"{flag}=" for flag in FOLDERS))]
    return joined + [after for flag, after in pairwise(words) if flag in FOLDERS]


def choices_of(base: Path, overrides: list[str], folders: list[str] | None = None) -> list[str]:
    """The options that `base` chose, as overrides, so that its settings exist while this line is composed.

    folders: of options beside conf/. An option that is in none of them stays as it is frozen.
    """
    places = [Path(folder) for folder in [conf_dir(), *(folders or [])]]
    typed = {_key(word) for word in overrides}
    chosen = OmegaConf.to_container(read_yaml(base / "config.yaml"), resolve=False).get("choices")  # type: ignore
    found = {group: _written(option) for group, option in (chosen if isinstance(chosen, dict) else {}).items()}
    # A file may only choose options: what else it might hold would reach Hydra's own settings, which can run code.
    return [f"{group}={option}" for group, option in found.items()
            if group in groups() and group not in typed and re.fullmatch(r"[\w/-]+|\[[\w/,-]*\]", option)
            and all(any((place / group / f"{name}.yaml").exists() for place in places)
                    for name in re.findall(r"[\w/-]+", option))]


def _key(override: str) -> str:
    return override.partition("=")[0].lstrip("+~")


def _value(override: str) -> str:
    return override.partition("=")[2]


def experiments() -> list[str]:
    """The names of the experiments in conf/, those in folders below as folder/name: Hydra lists one folder only."""
    folder = Path(conf_dir()) / "experiment"
    names = [file.relative_to(folder).with_suffix("").as_posix() for file in folder.glob("**/*.yaml")]
    return sorted(names, key=lambda name: [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)])


def _written(option: Any) -> str:
    return f"[{','.join(option)}]" if isinstance(option, list) else str(option)


def onto(base: Path, composed: DictConfig, overrides: list[str]) -> DictConfig:
    """The frozen settings of `base`, with what this line overrides taken from the fresh composition."""
    settings = read_yaml(base / "config.yaml")
    literal = OmegaConf.to_container(composed, resolve=False)
    with open_dict(settings):
        for word in overrides:
            key = _key(word)
            value = reduce(lambda node, name: node[name] if isinstance(node, dict) else None, key.split("."), literal)
            OmegaConf.update(settings, key, value, merge=False, force_add=True)
            if key in composed.choices:
                settings.choices[key] = composed.choices[key]
    return settings


def _snapshot_of(place: Path, overrides: list[str]) -> Path:
    """The snapshot that resume= means: the one it names, or a run's newest. Raises ConfigError."""
    run = run_of(place)
    found = whole_snapshots(run)
    if place.resolve() == run.resolve():
        if not found:
            raise ConfigError(f"resume={place}: this run has no whole snapshot to go on from. "
                              f"Start it again with from={place}")
        return found[-1].absolute()
    newer = [other.name for other in found if other.name > place.name]
    if newer and not any(word.startswith("run_dir=") for word in overrides):
        raise ConfigError(f"resume={place}: this run has a newer snapshot, {newer[-1]}, which would no longer be its "
                          f"future. Name a new run directory as well: run_dir=")
    return place.absolute()


def _known_keys() -> list[str]:
    """Every dotted setting and group of the default run, for a did-you-mean."""
    with initialize_config_dir(conf_dir(), version_base="1.3"):
        return list(dotted(compose("train")))


def dotted(settings: DictConfig) -> Iterator[str]:
    """The dotted names of all settings and groups."""
    def below(node: Any, path: str) -> Iterator[str]:
        yield path
        if isinstance(node, dict):
            for key, child in node.items():
                yield from below(child, f"{path}.{key}" if path else key)

    names = below(OmegaConf.to_container(settings, resolve=False), "")
    return (name for name in names if name and not name.endswith("_target_"))
