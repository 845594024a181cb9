"""A trained model out of a run directory, for the commands that use one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf, open_dict
from torch import nn

from forge.build import build_model
from forge.command_line import choices_in, choices_of, dotted, in_a_sentence, onto
from forge.config import Config, check, conf_dir, read_yaml, realise
from forge.errors import ConfigError
from forge.hardware import Topology
from forge.schema import did_you_mean
from forge.snapshot.folder import find_snapshot, read_manifest, run_of
from forge.snapshot.store import load_part, verify


@dataclass(frozen=True)
class Restored:
    """A model with the weights of a snapshot, and how it was made. snapshot: the folder that was read."""

    config: Config
    topology: Topology
    model: nn.Module
    snapshot: Path


def settings_of(place: Path, overrides: list[str]) -> DictConfig:
    """The frozen settings of a run, with overrides of options and values as forge.train takes them."""
    base = run_of(place)
    groups = [word for word in overrides if (Path(conf_dir()) / word.partition("=")[0]).is_dir()]
    settings = onto(base, _composed(base, groups), groups) if groups else read_yaml(base / "config.yaml")
    for word in overrides:
        if word not in groups:
            _set(settings, word)
    return settings


def _composed(base: Path, groups: list[str]) -> DictConfig:
    """A fresh composition with the run's choices, from which other options of a group are taken."""
    try:
        with initialize_config_dir(conf_dir(), version_base="1.3"):
            composed = compose("train", [*choices_of(base, groups), *groups], return_hydra_config=True)
    except HydraException as error:
        raise ConfigError(in_a_sentence(error)) from None
    with open_dict(composed):
        composed.choices = choices_in(composed.hydra.runtime.choices, composed)
        composed.pop("hydra")
    return composed


def _set(settings: DictConfig, word: str) -> None:
    """One setting=value, in Hydra's grammar. Raises ConfigError."""
    try:
        parsed = OverridesParser.create().parse_override(word)
    except HydraException as error:
        raise ConfigError(f"{word}: {str(error).splitlines()[0]}") from None
    key = parsed.get_key_element().lstrip("+")
    if OmegaConf.select(settings, key, default=settings) is settings:
        raise ConfigError(f"{key} is not a setting.{did_you_mean(key, list(dotted(settings)))}")
    OmegaConf.update(settings, key, parsed.value(), merge=False)


@contextmanager
def restored(place: Path, overrides: list[str], allowed: tuple[str, ...]) -> Iterator[Restored]:
    """The model of a run, or of one of its snapshots, in evaluation mode, on its device. Raises ForgeError."""
    settings = settings_of(place, overrides)
    if "weights" in settings.model:
        settings.model.weights = None                       # the snapshot has its own
    rows = settings.micro_batch or settings.global_batch // settings.hardware.processes
    settings.micro_batch = settings.global_batch = rows     # as many at a time as a rank of the run had
    settings.hardware.processes = 1
    settings.parallel = read_yaml(Path(conf_dir()) / "parallel/data.yaml")      # all of it here, as snapshots hold it
    config = realise(settings, allowed)
    check(config)
    snapshot = find_snapshot(place)
    verify(snapshot, read_manifest(snapshot))
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        os.environ.pop(name, None)                          # of a job this command was typed in: it is no part of it
    with config.hardware.claim() as topology:
        model = build_model(config, topology)
        load_part(snapshot, "model", model)
        yield Restored(config, topology, model.eval(), snapshot)
