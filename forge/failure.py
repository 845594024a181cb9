"""How a worker that fails says so: one small file in the run directory, read by whoever started it."""

from __future__ import annotations

import errno
import json
import logging
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from forge.errors import Exit, ForgeError, UnusableEnvironment

ENDED_WELL = (Exit.ANSWERED, Exit.STOPPED, Exit.INTERRUPTED)
DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
LOST_PEER = ("closed by peer", "connection reset", "connection closed", "broken pipe", "connection refused")


@dataclass(frozen=True)
class Failure:
    """What a worker died of. lost_peer: it says no more than that another worker was there no longer."""

    rank: int
    time: float
    exit_code: int
    message: str
    lost_peer: bool

    def write(self, run_dir: Path) -> None:
        """Whole or not at all. Raises OSError."""
        path = failure_file(run_dir, self.rank)
        path.parent.mkdir(exist_ok=True)
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(asdict(self)))
        os.replace(partial, path)

    @classmethod
    def read(cls, run_dir: Path, rank: int) -> Failure | None:
        """None where the worker left no word, or none that can be read."""
        try:
            words = json.loads(failure_file(run_dir, rank).read_text())
            return cls(rank, float(words["time"]), Exit(words["exit_code"]), str(words["message"]),
                       bool(words["lost_peer"]))
        except (OSError, ValueError, KeyError, TypeError):
            return None


class FirstFailure:
    """Records the first error of a worker at once, before anything is closed: closing may fail as well, or hang."""

    def __init__(self, run_dir: Path, rank: int) -> None:
        self.run_dir, self.rank = run_dir, rank
        self.exit_code: Exit | None = None

    @contextmanager
    def recorded(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            if self.exit_code is None:
                self.exit_code = record_failure(self.run_dir, self.rank, error)
            raise


def failure_file(run_dir: Path, rank: int) -> Path:
    return run_dir / "failures" / f"rank_{rank}.json"


def record_failure(run_dir: Path, rank: int, error: Exception) -> Exit:
    """Write down what this worker died of; returns its exit code. Never raises.

    The traceback of a crash goes to log.txt. Where nobody reads the file, or it cannot be written, the sentence goes
    to the terminal.
    """
    if isinstance(error, OSError) and error.errno in DISK_FULL:
        error = UnusableEnvironment(_full(error, run_dir))
    known = isinstance(error, ForgeError)
    code = error.exit_code if isinstance(error, ForgeError) else Exit.CRASHED
    message = str(error)
    if not known:
        logging.getLogger("forge").error("crashed", exc_info=error)
        message = (f"{type(error).__name__}: {message.strip().splitlines()[0] if message.strip() else ''}\n"
                   f"The traceback is in {run_dir / 'log.txt'}")
    lost = not known and any(words in str(error).lower() for words in LOST_PEER)
    try:
        Failure(rank, time.time(), int(code), message, lost).write(run_dir)
        told = "FORGE_PARENT" in os.environ     # it reads the file
    except OSError:
        told = False
    if not told:
        tell(f"worker {rank}: {message}")
    return code


def tell(sentence: str) -> None:
    """To the terminal, if it is still there."""
    with suppress(OSError, ValueError):     # closed at the other end, or at this one
        print(f"forge: {sentence}", file=sys.stderr, flush=True)


def _full(error: OSError, run_dir: Path) -> str:
    where = f" for {error.filename}" if error.filename else ""
    return (f"{error.strerror}{where}. The run writes to run_dir={run_dir}: free some space there, or set run_dir= to "
            f"another disk.")
