"""The run directory's frozen configuration: written once, whole, and never with a secret in it."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from forge.errors import ConfigError, UnusableEnvironment


def freeze(settings: DictConfig, run_dir: Path) -> Path | None:
    """Write run_dir/config.yaml. Interpolations stay literal.

    A resumed run keeps the configuration it had as config.before_<snapshot>.yaml, whose path is returned. Raises
    ConfigError where the directory holds another run, UnusableEnvironment where it cannot be written.
    """
    frozen = run_dir / "config.yaml"
    begun = any((run_dir / name).exists() for name in ("metrics.jsonl", "snapshots", "result.json"))
    kept = None
    goes_on = settings.resume is not None and Path(settings.resume).resolve().is_relative_to(run_dir.resolve())
    if frozen.exists() and begun and not goes_on:
        raise ConfigError(f"run_dir={run_dir} already holds a run: name another, or go on with resume={run_dir}")
    try:
        if frozen.exists() and goes_on:
            kept = run_dir / f"config.before_{Path(settings.resume).name}.yaml"
            _replace(kept, frozen.read_text())
        run_dir.mkdir(parents=True, exist_ok=True)
        _replace(frozen, OmegaConf.to_yaml(settings, resolve=False))
        return kept
    except OSError as error:
        raise UnusableEnvironment(f"run_dir={run_dir} cannot be written: {error.strerror}.") from None


@contextmanager
def owned(run_dir: Path) -> Iterator[None]:
    """Nobody else may run here meanwhile: two runs would cut each other's files. Raises ForgeError.

    The directory itself is locked, for as long as this process lives, however it ends.
    """
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        lock = os.open(run_dir, os.O_RDONLY)
    except OSError as error:
        raise UnusableEnvironment(f"run_dir={run_dir} cannot be written: {error.strerror}.") from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError:
        raise ConfigError(f"run_dir={run_dir}: another process is running here. Wait for it, or name another "
                          f"directory.") from None
    finally:
        os.close(lock)


def _replace(path: Path, text: str) -> None:
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        partial.write_text(text)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
