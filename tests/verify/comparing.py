"""One comparison inside this process."""

import json
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from conftest import TINY
from omegaconf import DictConfig

from forge.composition import training_settings
from forge.verify.__main__ import verify

composed = {}


def compose_once(words: list[str]) -> DictConfig:
    """Hydra takes longer than all that is computed, and most comparisons have a baseline in common."""
    key = tuple(word for word in words if not word.startswith("run_dir="))
    if key not in composed:
        composed[key] = training_settings(words)
    settings = composed[key].copy()
    settings.run_dir = next(word.partition("=")[2] for word in words if word.startswith("run_dir="))
    return settings


@dataclass(frozen=True)
class Answer:
    code: int
    result: dict

    @property
    def verdict(self) -> str:
        return self.result["verdict"]

    @property
    def reason(self) -> str:
        return self.result["reason"]


def compare(run_dir: Path, *words: str, common: list[str] = (), baseline: str = "", outside: Path | None = None,
            allowed: str = "", run: Path | None = None) -> Answer:
    """words: the candidate's. common: both sides'. outside: the folder that options were planted in.
    run: the starting point, in place of the tests' own words."""
    common = [] if run else [*TINY, *common]
    flags = ["--config-dir", f"{outside}/conf", f"allowed_packages={allowed}"] if outside else []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["forge.verify"])
        patch.setattr("forge.verify.pair.training_settings", compose_once)
        if outside:
            patch.syspath_prepend(outside)
            patch.setenv("PYTHONPATH", f"{outside}:{Path(__file__).parents[2]}")
        quoted = " ".join(f'"{word}"' for word in [*common, *baseline.split()])
        start = [f"from={run}"] if run else []
        code = verify([*flags, *start, *common, *words, f"baseline={quoted}", f"run_dir={run_dir}"])
    return Answer(int(code), json.loads((run_dir / "result.json").read_text()))
