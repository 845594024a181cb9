"""Have a side do its jobs: in this process where it trains with one, or through the launcher of its processes."""

from __future__ import annotations

import logging
import shutil
import sys
from pathlib import Path

from forge.errors import Exit, ForgeError, UnusableEnvironment
from forge.freeze import freeze
from forge.launch.local import run_workers
from forge.verify.arm import alone, run
from forge.verify.job import Job, write_jobs
from forge.verify.pair import Side


class Terminated(KeyboardInterrupt):
    """A signal other than Ctrl-C asks to end."""


class SideFailed(ForgeError):
    """A side could not do its jobs; what happened was said, or is the message."""

    def __init__(self, message: str, exit_code: Exit) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def do(side: Side, jobs: list[Job], allowed: tuple[str, ...]) -> Path:
    """Returns the folder with what the jobs left. Raises ForgeError, which names the side."""
    print(f"forge: {side.name}: {', '.join(job.name for job in jobs)}", file=sys.stderr, flush=True)
    side.folder.mkdir(parents=True, exist_ok=True)
    if side.config.hardware.processes == 1:
        _here(side, jobs)
    else:
        freeze(side.settings, side.folder)
        write_jobs(side.folder, jobs)
        code = run_workers("forge.verify.arm", side.folder, side.config, allowed)
        if code == Exit.INTERRUPTED:
            raise KeyboardInterrupt
        if code == Exit.STOPPED:
            raise Terminated
        if code != Exit.ANSWERED:
            _keep_log(side)
            raise SideFailed(f"The {side.name} could not be run (above).",
                             Exit.CRASHED if code == Exit.ASSERTION_FAILED else code)      # no verdict of its own
    return side.folder


def _here(side: Side, jobs: list[Job]) -> None:
    try:
        with alone():
            run(side.config, side.folder, jobs)
    except ForgeError as error:
        raise SideFailed(f"The {side.name} cannot be run: {error}", error.exit_code) from None
    except OSError:
        raise
    except Exception as error:
        if _lacks_room(error):
            raise UnusableEnvironment(_no_room(side, error)) from None
        logging.getLogger("forge").error("the %s crashed", side.name, exc_info=error)
        first = (str(error).strip().splitlines() or [""])[0]
        raise SideFailed(f"The {side.name} crashed: {type(error).__name__}: {first}\n"
                         f"The traceback is in {side.folder.parents[1] / 'log.txt'}", Exit.CRASHED) from None


def _lacks_room(error: Exception) -> bool:
    """On the device or, since safetensors has an error of its own for it, on the disk."""
    import torch

    return isinstance(error, torch.OutOfMemoryError) or "No space left" in str(error)


def _no_room(side: Side, error: Exception) -> str:
    if "No space left" in str(error):
        return f"run_dir={side.folder.parents[1]}: the disk is full. Name a folder on another disk."
    return f"The {side.name} does not fit into the device's memory: lower verify.rows or sequence_length."


def _keep_log(side: Side) -> None:
    """The scratch folder does not outlive the command."""
    log = side.folder / "log.txt"
    if log.exists():
        shutil.copyfile(log, side.folder.parents[1] / f"log_{side.name}.txt")
