"""What a worker process sets up about itself before it does anything slow."""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import sys
from pathlib import Path

PR_SET_PDEATHSIG = 1        # linux/prctl.h


def rank() -> int:
    """This worker's number over all nodes."""
    return int(os.environ.get("RANK", "0"))


def die_with_parent() -> None:
    """Ask Linux to kill this process when the one that started it ends, however it ends."""
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    parent = os.environ.get("FORGE_PARENT")
    if parent and os.getppid() != int(parent):      # it ended before the line above
        os.kill(os.getpid(), signal.SIGKILL)


def log_to(run_dir: Path) -> None:
    """Warnings of every rank go to run_dir/log.txt; those of the first also to the terminal."""
    logger = logging.getLogger("forge")
    logger.propagate = False
    for old in logger.handlers[:]:
        logger.removeHandler(old)
    file = logging.FileHandler(run_dir / "log.txt")
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
