"""How a worker that fails says so: one small file in the run directory, read by whoever started it."""

from __future__ import annotations

import json
import logging
import time
from pathlib import Path

from forge.errors import Exit, ForgeError

LOST_PEER = ("closed by peer", "connection reset", "connection closed", "broken pipe", "connection refused")


def failure_file(run_dir: Path, rank: int) -> Path:
    return run_dir / "failures" / f"rank_{rank}.json"


def record_failure(run_dir: Path, rank: int, error: BaseException) -> Exit:
    """Write down what this worker died of; returns its exit code. The traceback of a crash goes to log.txt."""
    code = error.exit_code if isinstance(error, ForgeError) else Exit.CRASHED
    message = str(error)
    if not isinstance(error, ForgeError):
        logging.getLogger("forge").error("crashed", exc_info=error)
        message = (f"{type(error).__name__}: {message.strip().splitlines()[0] if message.strip() else ''}\n"
                   f"The traceback is in {run_dir / 'log.txt'}")
    lost = not isinstance(error, ForgeError) and any(words in str(error).lower() for words in LOST_PEER)
    path = failure_file(run_dir, rank)
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps({"rank": rank, "time": time.time(), "exit_code": int(code), "message": message,
                                "lost_peer": lost}))
    return code
