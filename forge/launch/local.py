"""Workers of this machine: one a device, watched, and ended together."""

from __future__ import annotations

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
from typing import TYPE_CHECKING

from forge.errors import Exit, UnusableEnvironment
from forge.failure import ENDED_WELL, Failure, failure_file, tell
from forge.process import outlive_terminal
from forge.stopping import SIGNALS, heeded

if TYPE_CHECKING:
    from forge.config import Config

GRACE_SECONDS = 5.0         # for the other workers to end by themselves once one has failed
SHOW_CURSOR = "\x1b[?25h"


@dataclass(frozen=True)
class Local:
    """Starts `hardware.processes` workers, each in a session of its own, so that a Ctrl-C reaches only this process,
    which forwards it. They meet through a file; no port is taken. They die with this process."""

    def __call__(self, run_dir: Path, config: Config, allowed: tuple[str, ...]) -> Exit:
        return run_workers("forge.worker", run_dir, config, allowed)


def run_workers(module: str, run_dir: Path, config: Config, allowed: tuple[str, ...]) -> Exit:
    """python -m <module> run_dir, once for each process of the configuration, until all have ended."""
    outlive_terminal()
    # The workers inherit the block and lift it once they listen: a signal that comes earlier waits for them.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        with tempfile.TemporaryDirectory(prefix="forge_") as meeting:
            workers = _start_all(module, run_dir, config, Path(meeting), allowed)
            with _forwarding(workers) as received:
                failed = _wait(workers, run_dir)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    if any(worker.returncode < 0 for worker in workers) and sys.stderr.isatty():
        print(SHOW_CURSOR, end="", file=sys.stderr, flush=True)     # the progress bar's worker could not
    if received.count(signal.SIGINT) > 1:
        return Exit.INTERRUPTED
    if failed:
        return _report(failed, workers, run_dir)
    return max(Exit(worker.returncode) for worker in workers)


def _start_all(module: str, run_dir: Path, config: Config, meeting: Path,
               allowed: tuple[str, ...]) -> list[subprocess.Popen[bytes]]:
    """Raises UnusableEnvironment, and then leaves none running."""
    size = str(config.hardware.processes)
    shared = os.environ | config.hardware.environment() | {
        "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "FORGE_MEETING": str(meeting / "store"),
        "FORGE_PARENT": str(os.getpid())}
    workers: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(config.hardware.processes):
            workers.append(_start(module, rank, run_dir, shared, allowed))
    except OSError as error:
        for worker in workers:
            worker.kill()
            worker.wait()
        raise UnusableEnvironment(f"run_dir={run_dir}: no worker can be started on it: {error}.") from None
    return workers


def _start(module: str, rank: int, run_dir: Path, shared: dict[str, str],
           allowed: tuple[str, ...]) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", module, str(run_dir)]
    if allowed:
        command.append(f"allowed_packages={','.join(allowed)}")
    environment = shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    failure_file(run_dir, rank).unlink(missing_ok=True)
    if rank == 0:
        return subprocess.Popen(command, env=environment, start_new_session=True)
    with (run_dir / "log.txt").open("ab") as log:       # only the first worker has the terminal
        return subprocess.Popen(command, env=environment, start_new_session=True, stdin=subprocess.DEVNULL,
                                stdout=log, stderr=log)


@contextmanager
def _forwarding(workers: list[subprocess.Popen[bytes]]) -> Iterator[list[int]]:
    """Pass signals that ask to stop on to the workers, those that waited first; the second Ctrl-C kills them."""
    received: list[int] = []

    def forward(number: int, frame: FrameType | None) -> None:
        received.append(number)
        again = received.count(signal.SIGINT) > 1
        for worker in workers:
            if worker.poll() is None:
                worker.send_signal(signal.SIGKILL if again else number)
        if number == signal.SIGINT and not again:
            tell("stopping after this step (Ctrl-C again to stop at once)")

    before = {number: signal.signal(number, forward) for number in heeded()}
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _wait(workers: list[subprocess.Popen[bytes]], run_dir: Path) -> list[int]:
    """Until all have ended. Returns the ranks that failed by themselves, in order.

    Once one has failed, it has a moment to close what is open, and the others to end, before they are killed: they
    may hang in a collective that it will never join.
    """
    failed: list[int] = []
    deadline = float("inf")
    while True:
        running = [worker for worker in workers if worker.poll() is None]
        for rank, worker in enumerate(workers):
            if rank not in failed and (worker.returncode not in (None, *ENDED_WELL)
                                       or failure_file(run_dir, rank).exists()):
                failed.append(rank)
                deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        if not running:
            return failed
        if time.monotonic() > deadline:
            for worker in running:
                os.killpg(worker.pid, signal.SIGKILL)
                worker.wait()
            return failed
        time.sleep(0.02)


def _report(failed: list[int], workers: list[subprocess.Popen[bytes]], run_dir: Path) -> Exit:
    """Print the error of the worker that failed first, and return its exit code.

    A worker that was killed leaves no words of its own; the others then complain that they lost it, so it counts
    before them whatever the order in which they were seen to end.
    """
    reports = {rank: Failure.read(run_dir, rank) for rank in failed}
    silent = [rank for rank, words in reports.items() if words is None]
    spoken = sorted((words for words in reports.values() if words is not None and not (silent and words.lost_peer)),
                    key=lambda words: (words.lost_peer, words.time))
    if spoken:
        whose = f"worker {spoken[0].rank}: " if len(workers) > 1 else ""
        tell(f"{whose}{spoken[0].message}")
        return Exit(spoken[0].exit_code)
    code = workers[silent[0]].returncode
    end = f"was ended by signal {-code} ({_signal_name(-code)})" if code < 0 else f"ended with exit code {code}"
    tell(f"worker {silent[0]} {end}. Its last words may be in {run_dir / 'log.txt'}")
    return Exit(code) if code in set(Exit) else Exit.CRASHED


def _signal_name(number: int) -> str:
    if number == signal.SIGKILL:
        return "SIGKILL; often the kernel, out of memory"
    return signal.Signals(number).name if number in set(signal.Signals) else "unknown"
