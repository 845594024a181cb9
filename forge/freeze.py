"""The run directory's frozen configuration: written once, whole, and never with a secret in it."""

from __future__ import annotations

import os
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from forge.errors import ConfigError, UnusableEnvironment


def freeze(settings: DictConfig, run_dir: Path) -> None:
    """Write run_dir/config.yaml. Interpolations stay literal.

    A resumed run keeps the configuration it had as config.before_<snapshot>.yaml. Raises ConfigError where the
    directory holds another run, UnusableEnvironment where it cannot be written.
    """
    frozen = run_dir / "config.yaml"
    goes_on = settings.resume is not None and Path(settings.resume).resolve().is_relative_to(run_dir.resolve())
    if frozen.exists() and not goes_on:
        raise ConfigError(f"run_dir={run_dir} already holds a run: name another, or go on with resume={run_dir}")
    try:
        if frozen.exists():
            _replace(run_dir / f"config.before_{Path(settings.resume).name}.yaml", frozen.read_text())
        run_dir.mkdir(parents=True, exist_ok=True)
        _replace(frozen, OmegaConf.to_yaml(settings, resolve=False))
    except OSError as error:
        raise UnusableEnvironment(f"run_dir={run_dir} cannot be written: {error.strerror}.") from None


def _replace(path: Path, text: str) -> None:
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_text(text)
    os.replace(partial, path)
