"""Where snapshots lie and which of them are whole. Reads no tensor, and does not import torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from forge.errors import ConfigError, UnreadableError

FORMAT, VERSION = "forge snapshot", 1
MANIFEST = "manifest.json"


def snapshot_path(run_dir: Path, step: int) -> Path:
    return run_dir / "snapshots" / f"step_{step:08d}"


def whole_snapshots(run_dir: Path) -> list[Path]:
    """The snapshots of a run that were written to their end, oldest first."""
    return sorted(path for path in (run_dir / "snapshots").glob("step_*") if _is_whole(path))


def run_of(place: Path) -> Path:
    """The run directory of a path that is one, or one of its snapshots. Raises ConfigError."""
    for folder in (place, place.absolute().parent.parent):
        if (folder / "config.yaml").exists():
            return folder
    raise ConfigError(f"{place} is neither a run directory (it has no config.yaml) nor a snapshot of one.")


def find_snapshot(place: Path) -> Path:
    """The snapshot that a path means: itself, or the newest of a run directory. Raises UnreadableError."""
    if (place / MANIFEST).exists():
        return place
    found = whole_snapshots(place)
    if not found:
        raise UnreadableError(f"{place} is neither a snapshot nor a run directory with a whole one in snapshots/.")
    return found[-1]


def read_manifest(path: Path) -> dict[str, Any]:
    """What a snapshot says about itself. Raises UnreadableError."""
    try:
        manifest = json.loads((path / MANIFEST).read_text())
    except FileNotFoundError:
        raise UnreadableError(f"{path} is not a snapshot: it has no {MANIFEST}.") from None
    except (OSError, ValueError, RecursionError) as error:
        raise UnreadableError(f"{path / MANIFEST} cannot be read: {error}") from None
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise UnreadableError(f"{path} was not written by forge: {MANIFEST} does not say format={FORMAT!r}.")
    files = manifest.get("files")
    listed = isinstance(files, dict) and all(isinstance(entry, dict) and {"bytes", "sha256"} <= entry.keys()
                                             for entry in files.values())
    if not listed or not isinstance(manifest.get("identity"), dict):
        raise UnreadableError(f"{path / MANIFEST} is incomplete: it does not list the files.")
    if manifest.get("version") != VERSION:
        raise UnreadableError(f"{path} has version {manifest.get('version')} of the format, and this forge reads "
                              f"version {VERSION}.")
    return manifest


def _is_whole(path: Path) -> bool:
    try:
        files = read_manifest(path)["files"]
        return all((path / name).stat().st_size == entry["bytes"] for name, entry in files.items())
    except (UnreadableError, OSError, KeyError, TypeError):
        return False
