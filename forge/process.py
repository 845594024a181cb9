"""What a worker process sets up about itself before it does anything slow."""

from __future__ import annotations

import ctypes
import logging
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn, TextIO, cast

PR_SET_PDEATHSIG = 1        # linux/prctl.h


def rank() -> int:
    """This worker's number over all nodes."""
    return int(os.environ.get("RANK", "0"))


def die_with_parent(parent: int | None = None) -> None:
    """Ask Linux to kill this process when the one that started it ends, however it ends. parent: its number; None: what
    FORGE_PARENT says, where a launcher set it."""
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    parent = parent or int(os.environ.get("FORGE_PARENT", "0"))
    if parent and os.getppid() != parent:           # it ended before the line above
        os.kill(os.getpid(), signal.SIGKILL)


class Unbreakable:
    """A stream whose other end may close while we write: what can no longer be shown is dropped."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream

    def write(self, text: str) -> int:
        self._attempt(lambda: self.stream.write(text))
        return len(text)

    def flush(self) -> None:
        self._attempt(self.stream.flush)

    def _attempt(self, action: Callable[[], Any]) -> None:
        try:
            action()
        except BlockingIOError:     # it may take more later
            pass
        except (OSError, ValueError):
            with suppress(OSError, ValueError):     # what waits in a buffer must not fail again when Python ends
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, self.stream.fileno())
                os.close(nowhere)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


def outlive_terminal() -> None:
    """From now on, a terminal or pipe that is closed takes nothing with it. rich would exit with code 1."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is not None and not isinstance(stream, Unbreakable):
            setattr(sys, name, cast(TextIO, Unbreakable(stream)))


def leave(code: int) -> NoReturn:
    """End this process at once, without the exit hooks: after an error they wait for collectives that never end, and
    after none, a thread of torch's that is still there now and then aborts a process that had done its work."""
    for child in multiprocessing.active_children():
        child.kill()
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):
            stream.flush()
    os._exit(code)


class LogFile(logging.FileHandler):
    """log.txt. On a full disk a line is lost, and no traceback about that goes to the terminal: the run's own files
    meet the full disk as well, and say so."""

    def handleError(self, record: logging.LogRecord) -> None:
        pass


def log_threads() -> None:
    """The traceback of a thread that fails goes to log.txt; whoever needs the thread fails in its own words."""
    def log(failed: threading.ExceptHookArgs) -> None:
        if failed.exc_value is not None:
            logging.getLogger("forge").error("a thread failed", exc_info=failed.exc_value)

    threading.excepthook = log


def log_to(run_dir: Path) -> None:
    """Warnings of every rank go to run_dir/log.txt; those of the first also to the terminal."""
    logger = logging.getLogger("forge")
    logger.propagate = False
    for old in logger.handlers[:]:
        logger.removeHandler(old)
    file = LogFile(run_dir / "log.txt")
    file.setFormatter(logging.Formatter(f"%(asctime)s rank {rank()} %(levelname)s %(message)s"))
    logger.addHandler(file)
    if rank() == 0:
        terminal = logging.StreamHandler()
        terminal.setFormatter(logging.Formatter("forge: %(message)s"))
        terminal.addFilter(lambda record: record.levelno < logging.ERROR)    # the launcher prints the error
        logger.addHandler(terminal)
    logging.captureWarnings(True)
    warnings = logging.getLogger("py.warnings")
    warnings.addHandler(file)
    warnings.propagate = False
