"""Workers of this machine: one a device, watched, and ended together."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from forge.errors import Exit
from forge.failure import failure_file

if TYPE_CHECKING:
    from forge.config import Config

STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
GRACE_SECONDS = 5.0         # for the other workers to end by themselves once one has failed


@dataclass(frozen=True)
class Local:
    """Starts `hardware.processes` workers, each in a session of its own, so that a Ctrl-C reaches only this process,
    which forwards it. They meet through a file; no port is taken. They die with this process."""

    def __call__(self, run_dir: Path, config: Config, allowed: tuple[str, ...]) -> Exit:
        with tempfile.TemporaryDirectory(prefix="forge_") as meeting:
            workers = [_start(rank, config.hardware.processes, run_dir, Path(meeting), allowed)
                       for rank in range(config.hardware.processes)]
            with _forwarding(workers) as received:
                failed = _wait(workers)
        if received.count(signal.SIGINT) > 1:
            return Exit.INTERRUPTED
        if failed:
            return _report(failed, workers, run_dir)
        return max(Exit(worker.returncode) for worker in workers)


def _start(rank: int, processes: int, run_dir: Path, meeting: Path,
           allowed: tuple[str, ...]) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "forge.worker", str(run_dir)]
    if allowed:
        command.append(f"allowed_packages={','.join(allowed)}")
    environment = os.environ | {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(processes),
        "FORGE_MEETING": str(meeting / "store"), "FORGE_PARENT": str(os.getpid())}
    failure_file(run_dir, rank).unlink(missing_ok=True)
    if rank == 0:
        return subprocess.Popen(command, env=environment, start_new_session=True)
    with (run_dir / "log.txt").open("ab") as log:       # only the first worker has the terminal
        return subprocess.Popen(command, env=environment, start_new_session=True, stdin=subprocess.DEVNULL,
                                stdout=log, stderr=log)


@contextmanager
def _forwarding(workers: list[subprocess.Popen[bytes]]) -> Iterator[list[int]]:
    """Pass signals that ask to stop on to the workers; the second Ctrl-C kills them."""
    received: list[int] = []

    def forward(number: int, frame: FrameType | None) -> None:
        received.append(number)
        again = received.count(signal.SIGINT) > 1
        for worker in workers:
            if worker.poll() is None:
                worker.send_signal(signal.SIGKILL if again else number)
        if number == signal.SIGINT and not again:
            print("\nforge: stopping after this step (Ctrl-C again to stop at once)", file=sys.stderr)

    before = {number: signal.signal(number, forward) for number in STOPS}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _wait(workers: list[subprocess.Popen[bytes]]) -> list[int]:
    """Until all have ended. Returns the ranks that failed by themselves, in order.

    Once one has failed, the others have a moment before they are killed: they may hang in a collective that it will
    never join.
    """
    failed: list[int] = []
    deadline = float("inf")
    while any(worker.poll() is None for worker in workers) or len(failed) < sum(map(_failed, workers)):
        for rank, worker in enumerate(workers):
            if _failed(worker) and rank not in failed:
                failed.append(rank)
                deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        if time.monotonic() > deadline:
            for worker in workers:
                if worker.poll() is None:
                    os.killpg(worker.pid, signal.SIGKILL)
                    worker.wait()
            return failed
        time.sleep(0.02)
    return failed


def _failed(worker: subprocess.Popen[bytes]) -> bool:
    return worker.poll() not in (None, Exit.ANSWERED, Exit.STOPPED, Exit.INTERRUPTED)


def _report(failed: list[int], workers: list[subprocess.Popen[bytes]], run_dir: Path) -> Exit:
    """Print the error of the worker that failed first, and return its exit code.

    A worker that was killed leaves no words of its own; the others then complain that they lost it, so it counts
    before them whatever the order in which they were seen to end.
    """
    reports = {rank: _words(run_dir, rank) for rank in failed}
    silent = [rank for rank, words in reports.items() if words is None]
    spoken = sorted((words for words in reports.values() if words is not None and not (silent and words["lost_peer"])),
                    key=lambda words: (words["lost_peer"], words["time"]))
    if spoken:
        whose = f"worker {spoken[0]['rank']}: " if len(workers) > 1 else ""
        print(f"forge: {whose}{spoken[0]['message']}", file=sys.stderr)
        return Exit(spoken[0]["exit_code"])
    code = workers[silent[0]].returncode
    end = f"was ended by signal {-code} ({_signal_name(-code)})" if code < 0 else f"ended with exit code {code}"
    print(f"forge: worker {silent[0]} {end}. Its last words may be in {run_dir / 'log.txt'}", file=sys.stderr)
    return Exit.CRASHED


def _words(run_dir: Path, rank: int) -> dict[str, Any] | None:
    path = failure_file(run_dir, rank)
    return json.loads(path.read_text()) if path.exists() else None


def _signal_name(number: int) -> str:
    if number == signal.SIGKILL:
        return "SIGKILL; often the kernel, out of memory"
    return signal.Signals(number).name if number in set(signal.Signals) else "unknown"
