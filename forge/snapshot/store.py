"""Snapshots on disk: safetensors files and one JSON manifest, written beside their final name and then renamed.

torch.distributed.checkpoint is not used for what every rank holds whole: its .metadata is a pickle, and nothing that
forge loads can run code.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from functools import partial as given
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from forge.agreement import all_agree
from forge.errors import ConfigError, ForgeError, UnreadableError, UnusableEnvironment
from forge.hardware import Topology
from forge.snapshot.folder import FORMAT, MANIFEST, VERSION, read_manifest, snapshot_path
from forge.snapshot.tensors import Entry, entries, read_tensors, write_tensors
from forge.state import RunState, Stateful

if TYPE_CHECKING:
    from forge.parallel.spread import Spread

WHOLE: Mapping[str, Spread] = {}        # every rank holds all of everything


def write_snapshot(run_dir: Path, state: RunState, step: int, identity: dict[str, Any], topology: Topology) -> Path:
    """Save the run after update `step`. All ranks call it.

    identity: what must be the same for the data position to mean the same. The snapshot appears whole or not at all,
    and older ones are not touched. Raises UnusableEnvironment where the disk is full.
    """
    final = snapshot_path(run_dir, step)
    partial = final.with_name(f".{final.name}.partial")
    trouble = _attempt(lambda: _fresh(partial), run_dir) if topology.is_first else None
    _together(trouble, partial, topology)
    own = {_of_rank(name, topology.rank): part for name, part in {**state.own, **state.sums}.items()}
    trouble = _write_shared(partial, state, run_dir, topology)
    _together(trouble or _attempt(lambda: _write_own(partial, own), run_dir), partial, topology)
    if topology.is_first:
        trouble = _attempt(lambda: _publish(partial, final, step, identity, topology.world_size), run_dir)
    _together(trouble, partial, topology)
    return final


def read_snapshot(path: Path, state: RunState, identity: dict[str, Any], topology: Topology) -> None:
    """Bring the run to where the snapshot was taken. Raises ForgeError before anything is changed, where it can."""
    manifest = read_manifest(path)
    verify(path, manifest)
    if not manifest["identity"]:
        raise ConfigError(f"resume={path}: this snapshot holds weights alone, as forge.convert writes them, and no run "
                          f"to go on with. Start one from these weights with from=.")
    for key, value in identity.items():
        saved = manifest["identity"].get(key)
        if saved != value:
            raise ConfigError(f"resume={path}: the run was at a position in the data that belongs to {key}={saved}, "
                              f"and now {key}={value}. Set it back, or start again with from=.")
    for name, part in state.shared.items():
        load_part(path, name, part, state.spread)
    for name, part in state.own.items():
        if topology.rank < manifest.get("world_size", 0):   # a new rank, in a larger world, starts with its own
            load_part(path, _of_rank(name, topology.rank), part)
    for name, part in state.sums.items() if topology.is_first else ():
        for rank in range(manifest.get("world_size", 0)):
            if f"{_of_rank(name, rank)}.safetensors" in manifest["files"]:
                load_part(path, _of_rank(name, rank), part)


def _of_rank(name: str, rank: int) -> str:
    return f"{name}_{rank:05d}"


def load_part(path: Path, name: str, part: Any, spread: Mapping[str, Spread] = WHOLE) -> None:
    """Load one file of a snapshot into what it was saved from. Raises ConfigError where it does not fit."""
    values = read_part(path / f"{name}.safetensors", spread)
    try:
        part.load_state_dict(values)
    except ForgeError:
        raise
    except (RuntimeError, KeyError, ValueError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path} is the snapshot of another {name}: {_first_difference(str(error))}") from None


def read_part(file: Path, spread: Mapping[str, Spread] = WHOLE) -> dict[str, Any]:
    """The tensors and values of one file, on the CPU; of what is spread this rank's slice. Raises UnreadableError."""
    try:
        metadata, tensors = read_tensors(file, spread)
        values = json.loads(metadata.get("values", "{}"))
        if not isinstance(values, dict):
            raise ValueError("its values are no mapping")
        return values | tensors
    except (SafetensorError, OSError, ValueError) as error:
        raise UnreadableError(f"{file} is not a whole safetensors file: {error}") from None


def verify(path: Path, manifest: dict[str, Any]) -> None:
    """Compare every file with the checksum in the manifest. Raises UnreadableError."""
    for name, entry in manifest["files"].items():
        file = path / name
        if not file.exists() or file.stat().st_size != entry["bytes"] or _digest(file) != entry["sha256"]:
            raise UnreadableError(f"{file} is damaged: it differs from what {MANIFEST} records. Older snapshots in "
                                  f"{path.parent} may be whole: name one with resume=, and a new run_dir=")


def _fresh(partial: Path) -> None:
    """An empty folder to write in. What killed runs left half written goes."""
    for left in partial.parent.glob(".step_*.partial"):
        shutil.rmtree(left)
    partial.mkdir(parents=True)


def _write_shared(folder: Path, state: RunState, run_dir: Path, topology: Topology) -> ForgeError | None:
    """What all ranks share is written by the first, which gathers what is spread from the ranks of its axis. They
    send all they have, so it takes all, even after it could not write."""
    trouble: ForgeError | None = None
    helps = any(spread.axis_has_first for spread in state.spread.values())
    for name, part in state.shared.items() if topology.is_first or helps else ():
        values = part.state_dict()
        listed = entries(values, state.spread)
        if not topology.is_first:
            listed = [entry for entry in listed if entry.spread is not None]
        wholes = (entry.whole() for entry in listed)
        if topology.is_first and trouble is None:
            trouble = _attempt(given(_write_part, folder / f"{name}.safetensors", values, listed, wholes), run_dir)
        deque(wholes, maxlen=0)
    return trouble


def _write_own(folder: Path, parts: dict[str, Stateful]) -> None:
    for name, part in parts.items():
        values = part.state_dict()
        listed = entries(values, WHOLE)
        _write_part(folder / f"{name}.safetensors", values, listed, (entry.whole() for entry in listed))


def _write_part(file: Path, values: dict[str, Any], listed: list[Entry], wholes: Iterator[Tensor]) -> None:
    plain = {key: value for key, value in values.items() if not isinstance(value, Tensor)}
    needed = sum(entry.nbytes for entry in listed)
    free = shutil.disk_usage(file.parent).free
    if free < needed:
        raise UnusableEnvironment(_full(file, f"{needed / 1e9:.2f} GB are needed and {free / 1e9:.2f} GB are free"))
    write_tensors(file, listed, wholes, {"values": json.dumps(plain)})
    _sync(file)
    with safe_open(file, "pt") as opened:       # a file system that lies about a full disk is found out here
        if set(opened.keys()) != {entry.name for entry in listed}:
            raise UnusableEnvironment(_full(file, "what was written cannot be read back"))


def _publish(partial: Path, final: Path, step: int, identity: dict[str, Any], world_size: int) -> None:
    files = {file.name: {"bytes": file.stat().st_size, "sha256": _digest(file)} for file in partial.iterdir()}
    manifest = {"format": FORMAT, "version": VERSION, "step": step, "world_size": world_size, "identity": identity,
                "files": files}
    (partial / MANIFEST).write_text(json.dumps(manifest, indent=1))
    _sync(partial / MANIFEST)
    _sync(partial)
    if final.exists():          # the same step again, after a resume: the bits are the same
        shutil.rmtree(final)
    os.rename(partial, final)
    _sync(final.parent)


def _attempt(action: Callable[[], None], run_dir: Path) -> ForgeError | None:
    try:
        action()
    except ForgeError as error:
        return error
    except (OSError, SafetensorError) as error:
        return UnusableEnvironment(_full(run_dir, str(error)))
    return None


def _together(trouble: ForgeError | None, partial: Path, topology: Topology) -> None:
    """Go on only if all ranks can; otherwise leave nothing half written."""
    if all_agree(trouble is None, topology):
        return
    if topology.is_first:
        shutil.rmtree(partial, ignore_errors=True)
    raise trouble or UnusableEnvironment("another rank could not write its part of the snapshot")


def _full(where: Path, why: str) -> str:
    return f"No snapshot could be written in {where}: {why}. Free some space, or set run_dir=; older ones are whole."


def _digest(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _first_difference(message: str) -> str:
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    return lines[1] if len(lines) > 1 else lines[0] if lines else "its names differ"
