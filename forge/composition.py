"""What commands beside forge.train compose: the settings of training runs, and the values of their own options."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import hydra
from hydra import compose, initialize_config_dir
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from forge.command_line import CommandLine, dotted, in_a_sentence, refused_key
from forge.config import conf_dir
from forge.errors import ConfigError
from forge.schema import did_you_mean


def training_settings(words: list[str]) -> DictConfig:
    """The settings that forge.train would freeze for these words. Raises ConfigError."""
    line = CommandLine.parse(words)
    outcome: list[DictConfig | Exception] = []

    def job(composed: DictConfig) -> None:
        try:
            outcome.append(line.settle(composed)[0])
        except Exception as error:      # Hydra would print a line of its own before passing it on
            outcome.append(error)

    with _as_it_was():
        line.compose(hydra.main(version_base="1.3", config_path=conf_dir(), config_name="train")(job))
    (settings,) = outcome
    if isinstance(settings, Exception):
        raise settings
    return settings


@contextmanager
def _as_it_was() -> Iterator[None]:
    """The line that was typed, what Hydra is told by the environment, and the loggers, which it silences, are this
    command's own afterwards."""
    typed, told = sys.argv[1:], os.environ.get("HYDRA_FULL_ERROR")
    root = logging.getLogger()
    level, loggers = root.level, [one for one in root.manager.loggerDict.values() if isinstance(one, logging.Logger)]
    silent = [logger.disabled for logger in loggers]
    try:
        yield
    finally:
        sys.argv[1:] = typed
        root.setLevel(level)
        for logger, disabled in zip(loggers, silent, strict=True):
            logger.disabled = disabled
        os.environ.pop("HYDRA_FULL_ERROR", None)
        if told is not None:
            os.environ["HYDRA_FULL_ERROR"] = told


def own_settings(name: str, group: str, overrides: list[str], folders: list[str], of: str = "") -> dict[str, Any]:
    """The values of a command's own group in conf/<name>.yaml, with what was typed on top.

    folders: of options beside conf/. of: what the settings are settings of, for the sentence about one that is none.
    Raises ConfigError.
    """
    search = [f"file://{Path(folder).absolute()}" for folder in folders]
    beside = [f"hydra.searchpath=[{','.join(search)}]"] if search else []
    try:
        made = OmegaConf.to_container(_composed(name, [*beside, *overrides])[group], resolve=True)
    except (HydraException, OmegaConfBaseException, YAMLError) as error:
        key = refused_key(error)
        if key is None:
            raise ConfigError(in_a_sentence(error)) from None
        choice = [word for word in overrides if word.partition("=")[0] == group]
        known = list(dotted(_composed(name, [*beside, *choice])))
        raise ConfigError(f"{key} is not a setting{of}.{did_you_mean(key, known)} {_beside(key, known)}") from None
    assert isinstance(made, dict)
    return {str(key): value for key, value in made.items()}


def _composed(name: str, overrides: list[str]) -> DictConfig:
    with initialize_config_dir(conf_dir(), version_base="1.3"):
        return compose(name, overrides)


def _beside(key: str, known: list[str]) -> str:
    """The settings that stand where the key would."""
    parent = key.rpartition(".")[0]
    while parent and parent not in known:
        parent = parent.rpartition(".")[0]
    there = [name for name in known if name.rpartition(".")[0] == parent and name != parent]
    return f"Settings: {', '.join(there)}."
