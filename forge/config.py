"""Turn the YAML that Hydra composed into one typed, checked value.

conf/ holds values, forge/ holds types: a part's dataclass has no defaults, so every number in force can be read in
conf/, and a setting that no YAML states is an error.
"""

from __future__ import annotations

import dataclasses
import importlib
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_type_hints

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from forge.attention import Attention
from forge.augment import Augment
from forge.batching import Batching
from forge.checkpointing import Checkpointing
from forge.comm import Comm
from forge.compile import Compile
from forge.data import Data
from forge.dataloader import DataLoader
from forge.errors import ConfigError
from forge.evaluation import Evaluation
from forge.hardware import Hardware
from forge.launch import Launch
from forge.loss import Loss
from forge.model import Model
from forge.moe_router import MoERouter
from forge.operators import Operators
from forge.optimizer import Optimizer
from forge.overlap import Overlap
from forge.parallel import Parallel
from forge.passes import PassOrder
from forge.precision import Precision
from forge.schedule import Schedule
from forge.schema import convert, did_you_mean, structure
from forge.snapshot import Snapshot
from forge.tracker import Tracker, Trackers


@dataclass(frozen=True)
class Config:
    """Everything a run is told. The groups in pipeline order, then the settings of the run itself.

    steps: the schedule's horizon, in updates. stop_at: end earlier; null: at `steps`.
    global_batch: rows in an update over all ranks. micro_batch: rows in one forward pass of one rank; null: its whole
        share of the global batch.
    sequence_length: tokens in a row.
    resume: the snapshot to go on from, or null for a fresh start.
    reproducible: only kernels that give the same bits every time.
    choices: the option that was chosen in each group.
    """

    launch: Launch
    hardware: Hardware
    parallel: Parallel
    data: Data
    batching: Batching
    dataloader: DataLoader
    overlap: Overlap
    augment: Augment
    model: Model
    attention: Attention
    operators: Operators
    moe_router: MoERouter
    loss: Loss
    precision: Precision
    checkpointing: Checkpointing
    compile: Compile
    passes: PassOrder
    comm: Comm
    optimizer: Optimizer
    schedule: Schedule
    evaluation: Evaluation
    snapshot: Snapshot
    tracker: Trackers
    steps: int
    stop_at: int | None
    seed: int
    reproducible: bool
    global_batch: int
    micro_batch: int | None
    sequence_length: int
    resume: str | None
    run_dir: str
    choices: dict[str, str | list[str]]

    @property
    def last_step(self) -> int:
        return self.steps if self.stop_at is None else min(self.stop_at, self.steps)

    def rows_per_pass(self, data_size: int) -> int:
        """Rows in one forward pass of one of `data_size` ranks."""
        return self.micro_batch or self.global_batch // data_size

    def prepare_environment(self) -> None:
        """Set what torch reads when it is imported: to be called before that."""
        os.environ.update(self.hardware.environment())
        if self.reproducible:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")     # what cuBLAS needs to repeat its bits

    def share_problems(self, data_size: int) -> Iterator[str]:
        """Why a global batch cannot be shared by so many ranks."""
        together = (self.micro_batch or 1) * data_size
        if together > 0 and self.global_batch % together:
            into = f"micro_batch={self.micro_batch} on {data_size} ranks" if self.micro_batch else f"{data_size} ranks"
            yield (f"global_batch={self.global_batch} does not divide into {into} (hardware.processes, over all "
                   f"nodes): make it a multiple of {together}.")

    def problems(self, config: Config) -> Iterator[str]:
        for name in ("steps", "stop_at", "global_batch", "micro_batch", "sequence_length"):
            value = getattr(self, name)
            if value is not None and value < 1:
                yield f"{name}={value}: at least 1 is wanted."
        if self.tracker.every < 1:
            yield f"tracker.every={self.tracker.every}: at least 1 is wanted."
        if not 0 <= self.seed < 2**63:
            yield f"seed={self.seed}: 0 or more, and less than 2^63, is wanted."
        yield from self.share_problems(self.hardware.processes)
        if self.stop_at is not None and self.stop_at > self.steps:
            yield f"stop_at={self.stop_at} lies behind steps={self.steps}, the end of the schedule: raise steps."


def groups() -> list[str]:
    """The names of the config groups."""
    return [name for name, hint in get_type_hints(Config).items()
            if getattr(hint, "_is_protocol", False) or hint is Trackers]


def conf_dir() -> str:
    """conf/ beside the package in a checkout, forge/conf in an installed wheel."""
    packaged = Path(__file__).parent / "conf"
    return str(packaged if packaged.is_dir() else Path(__file__).parents[1] / "conf")


def load(run_dir: Path, allowed: tuple[str, ...] = ()) -> Config:
    """The configuration that was frozen into a run directory."""
    return realise(read_yaml(run_dir / "config.yaml"), allowed)


def read_yaml(path: Path) -> DictConfig:
    """The mapping in a YAML file. Raises ConfigError."""
    if not path.is_file():
        raise ConfigError(f"{path.parent} is not a run directory: it has no {path.name}.")
    try:
        text = path.read_text()
        if any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text, Loader=yaml.SafeLoader)):
            raise ConfigError(f"{path} holds YAML aliases, which forge does not write, and which can grow without end.")
        loaded = OmegaConf.create(text)
    except ConfigError:
        raise
    except Exception as error:      # yaml's errors share no base class with OmegaConf's
        raise ConfigError(f"{path} cannot be read: {str(error).splitlines()[0]}") from None
    if not isinstance(loaded, DictConfig):
        raise ConfigError(f"{path} holds no settings.")
    return loaded


def realise(composed: DictConfig, allowed: tuple[str, ...] = ()) -> Config:
    """Every group becomes the dataclass its `_target_` names. All mistakes are reported at once.

    allowed: packages beside forge whose classes may be named. Raises ConfigError.
    """
    try:
        values: dict[str, Any] = OmegaConf.to_container(composed, resolve=True)  # type: ignore[assignment]
    except OmegaConfBaseException as error:
        raise ConfigError(_unresolved(error, composed)) from None
    hints = get_type_hints(Config)
    mistakes: list[str] = []
    for key in values.keys() - hints.keys():
        mistakes.append(f"{key} is not a setting.{did_you_mean(key, list(hints))}")
    missing = [key for key in hints if key not in values]
    mistakes += [f"{key} is not set." for key in missing]
    made = {key: _setting(key, hint, values[key], allowed, mistakes) for key, hint in hints.items() if key in values}
    if mistakes:
        raise ConfigError("\n".join(mistakes))
    return Config(**made)


def _unresolved(error: OmegaConfBaseException, composed: DictConfig) -> str:
    """Why a value cannot be had. Most often a part takes it from another part, and another option is chosen there."""
    key, said = getattr(error, "full_key", ""), str(error).splitlines()[0]
    wanted = re.fullmatch(r"Interpolation key '((\w+)\.[\w.]+)' not found", said)
    if wanted is None:
        return f"{key}: {said}"
    source, group = wanted.groups()
    choice = (composed.get("choices") or {}).get(group)
    which = f"{group}={choice}" if choice else f"this {group}"
    return (f"{key} takes its value from {source}, which {which} does not have: choose another {group}, leave "
            f"{key.partition('.')[0]} at its default, or set {key}.")


def option_of(group: str, protocol: type, values: Any, allowed: tuple[str, ...] = ()) -> Any:
    """A single option, outside of a whole configuration: the dataclass that `_target_` in the values names.

    Raises ConfigError, as a whole configuration does.
    """
    mistakes: list[str] = []
    made = _part(group, group, protocol, values, allowed, mistakes)
    if mistakes:
        raise ConfigError("\n".join(mistakes))
    return made


def check(config: Config) -> None:
    """Raise once, with every complaint that the parts have about each other."""
    parts = [config, *vars(config).values(), *config.tracker.options.values()]
    problems = [problem for part in parts for problem in getattr(part, "problems", _none)(config)]
    if problems:
        raise ConfigError("\n".join(problems))


def _none(config: Config) -> Iterator[str]:
    return iter(())


def _setting(key: str, hint: Any, value: Any, allowed: tuple[str, ...], mistakes: list[str]) -> Any:
    if getattr(hint, "_is_protocol", False):
        return _part(key, key, hint, value, allowed, mistakes)
    if hint is Trackers and isinstance(value, Mapping):      # a list of options: each has its own name in the group
        every = convert(int, value.get("every"), f"{key}.every", mistakes)
        return Trackers(every, {name: _part(f"{key}.{name}", key, Tracker, node, allowed, mistakes)
                                for name, node in value.items() if name != "every"})
    return convert(hint, value, key, mistakes)


def _part(path: str, group: str, protocol: type, value: Any, allowed: tuple[str, ...], mistakes: list[str]) -> Any:
    if not isinstance(value, Mapping) or "_target_" not in value:
        mistakes.append(f"{path} names no option: it has no _target_.")
        return None
    settings = {key: item for key, item in value.items() if key != "_target_"}
    try:
        schema = _schema(path, group, value["_target_"], allowed)
    except ConfigError as error:
        mistakes.append(str(error))
        return None
    part = structure(schema, settings, path, mistakes)
    if part is not None and not isinstance(part, protocol):
        mistakes.append(f"{path}: {schema.__name__} is not a {protocol.__name__} (see forge/{group}/__init__.py).")
    return part


def _schema(path: str, group: str, target: Any, allowed: tuple[str, ...]) -> type:
    """The dataclass a class path names. Only modules of forge/<group> and of allowed packages are ever imported."""
    module, _, name = str(target).rpartition(".")
    package = module.partition(".")[0]
    if not module.startswith(f"forge.{group}.") and not any(f"{module}.".startswith(f"{name}.") for name in allowed):
        where = f"forge.{group}" if package == "forge" else f"forge and allowed_packages=[{', '.join(allowed)}]"
        raise ConfigError(f"{path}._target_={target} lies outside {where}. If you trust that code, allow it on the "
                          f"command line: allowed_packages={package or 'PACKAGE'}")
    try:
        schema = getattr(importlib.import_module(module), name)
    except ImportError as error:
        raise ConfigError(f"{path}._target_={target} cannot be imported: {error}") from None
    except AttributeError:
        raise ConfigError(f"{path}._target_={target}: {module} has no {name}.") from None
    if not (isinstance(schema, type) and dataclasses.is_dataclass(schema)):
        raise ConfigError(f"{path}._target_={target} is not a dataclass, and an option is one.")
    if not any(f"{schema.__module__}.".startswith(f"{name}.") for name in ("forge", *allowed)):
        raise ConfigError(f"{path}._target_={target} is defined in {schema.__module__}, which is not allowed.")
    return schema
