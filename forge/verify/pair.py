"""The two configurations that are compared, and in what they differ."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from forge.command_line import dotted
from forge.composition import training_settings
from forge.config import Config, check, realise
from forge.errors import ConfigError
from forge.schema import did_you_mean
from forge.verify.changes import Change, changes
from forge.verify.words import Words

DROPOUT = "model.dropout"


@dataclass(frozen=True)
class Side:
    """name: baseline or candidate. folder: where its processes find their configuration and leave what they found."""

    name: str
    settings: DictConfig
    config: Config
    folder: Path
    dropout: float = 0.0            # that was set to 0


@dataclass(frozen=True)
class Pair:
    """declared: patterns of settings that the user says change the maths. notes: what a reader has to know."""

    baseline: Side
    candidate: Side
    changes: list[Change]
    declared: list[str]
    allowed: tuple[str, ...]
    notes: list[str]

    @property
    def sides(self) -> tuple[Side, Side]:
        return self.baseline, self.candidate

    @classmethod
    def of(cls, words: Words) -> Pair:
        """Compose and check both. Raises ConfigError, which says where it is the baseline's."""
        scratch = words.run_dir / "scratch"
        touched = any(word.partition("=")[0].lstrip("+~") == DROPOUT for word in words.candidate + words.baseline)
        candidate = _side("candidate", words.candidate, words, scratch, touched)
        try:
            baseline = _side("baseline", words.baseline, words, scratch, touched)
        except ConfigError as error:
            typed = " ".join(words.baseline) or "the run without the words on the line"
            raise ConfigError(f"The baseline ({typed}) cannot run:\n{error}") from None
        found = changes(baseline.settings, candidate.settings)
        _same_model(found, words.declared)
        _known(words.declared, (baseline.settings, candidate.settings))
        return cls(baseline, candidate, found, words.declared, words.allowed, _notes(baseline, candidate, found))


def _side(name: str, own: list[str], words: Words, scratch: Path, dropout_touched: bool) -> Side:
    folder = scratch / name
    settings = training_settings([*words.shared, *own, f"run_dir={folder}"])
    dropout = 0.0 if dropout_touched else float(settings.model.get("dropout") or 0.0)
    if dropout:
        settings.model.dropout = 0.0    # what a kernel draws is its own, so paths that draw cannot be compared
    settings.resume = None
    config = realise(settings, words.allowed)
    check(config)
    return Side(name, settings, config, folder, dropout)


def _same_model(found: list[Change], declared: list[str]) -> None:
    """Raises ConfigError where another model was chosen and nobody said that it should be."""
    for change in found:
        if change.key == "model" and not any(fnmatchcase("model", pattern) for pattern in declared):
            raise ConfigError(f"model={change.after} is compared with model={change.before}, another model: repeat "
                              f"model={change.after} in baseline='...', or say that it is meant, declared=model.")


def _known(declared: list[str], settings: tuple[DictConfig, ...]) -> None:
    """Raises ConfigError where a pattern speaks of no setting of either side."""
    names = {name for one in settings for name in dotted(one)}
    for pattern in declared:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ConfigError(f"declared={pattern} matches no setting.{did_you_mean(pattern, sorted(names))}")


def _notes(baseline: Side, candidate: Side, found: list[Change]) -> list[str]:
    notes = [] if found else ["The two configurations are the same."]
    if baseline.dropout or candidate.dropout:
        was = " and ".join(dict.fromkeys(f"{side.dropout:g}" for side in (baseline, candidate)))
        notes.append(f"model.dropout={was} was set to 0 on both sides: kernels draw each in their own way.")
    unused: dict[str, Any] = candidate.config.model.unused()
    for change in found:
        if change.group in unused and change.group in baseline.config.model.unused():
            notes.append(f"{change} has no effect: model={candidate.config.choices.get('model')} "
                         f"{unused[change.group]}.")
    return notes


@dataclass(frozen=True)
class Share:
    """rows: in an update, over all ranks. micro_batch: rows in one forward pass of one rank."""

    rows: int
    micro_batch: int


def shares(baseline: Config, candidate: Config, rows: int, most_micro_batches: int) -> tuple[Share, Share]:
    """How many rows of data each side is given: at least `rows`, as many for both where their updates are as large,
    and cut into micro-batches as the run's own; of two rows at least, where the run's have as many, since options may
    mix them up."""
    sides = (baseline, candidate)
    cuts = _cuts(_micro_batches(baseline), _micro_batches(candidate), most_micro_batches)
    parts = [config.hardware.processes * cut for config, cut in zip(sides, cuts, strict=True)]
    sizes = _sizes(baseline.global_batch, candidate.global_batch)
    unit = math.lcm(*(part // math.gcd(part, size) for part, size in zip(parts, sizes, strict=True)))
    least = [part * min(2, config.rows_per_pass(config.hardware.processes))
             for part, config in zip(parts, sides, strict=True)]
    times = unit * max(1, math.ceil(rows / (unit * min(sizes))),
                       *(math.ceil(wanted / (unit * size)) for wanted, size in zip(least, sizes, strict=True)))
    return tuple(Share(times * size, times * size // part)         # type: ignore[return-value]
                 for size, part in zip(sizes, parts, strict=True))


def _micro_batches(config: Config) -> int:
    processes = config.hardware.processes
    return config.global_batch // (config.rows_per_pass(processes) * processes)


def _cuts(baseline: int, candidate: int, most: int) -> tuple[int, int]:
    """Micro-batches of each side, at most so many, and different where they are."""
    largest = max(baseline, candidate)
    if largest <= most:
        return baseline, candidate
    first, second = (max(1, count * most // largest) for count in (baseline, candidate))
    return first, second


def _sizes(baseline: int, candidate: int) -> tuple[int, int]:
    """The proportion of two updates, in small numbers."""
    common = math.gcd(baseline, candidate)
    sizes = baseline // common, candidate // common
    return sizes if max(sizes) <= 8 else ((1, 2) if baseline < candidate else (2, 1))


def plain_settings(settings: DictConfig) -> dict[str, Any]:
    """For result.json: interpolations stay literal, so no secret is written."""
    return OmegaConf.to_container(settings, resolve=False)      # type: ignore[return-value]
