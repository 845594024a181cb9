"""The parent's side of an arm: its processes, what they are asked, and how their end is told."""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from typing import Any

from forge.bench.trial import Trial
from forge.errors import Exit, ForgeError
from forge.failure import Failure

OUT_OF_MEMORY = ("OutOfMemoryError", "out of memory", "MemoryError", "can't allocate memory", "SIGKILL")


class ArmFailed(ForgeError):
    """An arm that does not run: a row of the table. arm: its name."""

    def __init__(self, sentence: str, exit_code: Exit, arm: str) -> None:
        """exit_code: what a training run would have ended with."""
        super().__init__(sentence)
        self.exit_code, self.arm = exit_code, arm

    @property
    def status(self) -> str:
        return "out of memory" if any(words in str(self) for words in OUT_OF_MEMORY) else "failed"


class Arm:
    """The processes of one configuration, one a rank, which wait until they are asked.

    They die with this process, and a Ctrl-C on the terminal does not reach them.
    """

    def __init__(self, trial: Trial, patience: float, cold: bool, allowed: tuple[str, ...], running: list[Arm]) -> None:
        """patience, cold: see forge.bench.Timing. running: holds the arm until it ends. Raises ArmFailed."""
        self.trial, self.name, self.patience, self.running = trial, trial.name, patience, running
        running.append(self)
        self.processes: list[subprocess.Popen[bytes]] = []
        self._said: list[bytes] = []
        self._meeting = tempfile.TemporaryDirectory(prefix="forge_")
        try:
            self._start(allowed, cold)
            self.facts = self._answers()[0]
        except BaseException:
            self.end()
            raise

    def ask(self, do: str, **asked: Any) -> dict[str, Any]:
        """The answer of the first rank; of memory, the fullest rank's. Raises ArmFailed."""
        line = json.dumps({"do": do, **asked}).encode() + b"\n"
        for process in self.processes:
            assert process.stdin is not None
            with suppress(BrokenPipeError):         # what it died of is found out below
                process.stdin.write(line)
                process.stdin.flush()
        answers = self._answers()
        peaks = [answer["peak_memory"] for answer in answers if answer.get("peak_memory") is not None]
        return answers[0] | ({"peak_memory": max(peaks)} if peaks else {})

    def end(self) -> None:
        """At once: nothing that an arm holds is worth keeping."""
        for process in self.processes:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)      # its data workers as well
            process.wait()
            for stream in (process.stdin, process.stdout):
                with suppress(OSError):
                    stream.close()      # type: ignore[union-attr]
        self._meeting.cleanup()
        if self in self.running:
            self.running.remove(self)

    def _start(self, allowed: tuple[str, ...], cold: bool) -> None:
        assert self.trial.config is not None
        hardware = self.trial.config.hardware
        size = str(hardware.processes)
        shared = os.environ | hardware.environment() | {
            "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "FORGE_MEETING": f"{self._meeting.name}/store",
            "FORGE_PARENT": str(os.getpid())}
        if cold:
            shared |= {"TORCHINDUCTOR_CACHE_DIR": f"{self._meeting.name}/inductor",
                       "TRITON_CACHE_DIR": f"{self._meeting.name}/triton"}
        command = [sys.executable, "-m", "forge.bench.arm", str(self.trial.folder)]
        command += [f"allowed_packages={','.join(allowed)}"] if allowed else []
        with (self.trial.folder / "output.txt").open("ab") as output:
            for rank in range(hardware.processes):
                self.processes.append(subprocess.Popen(
                    command, env=shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)}, start_new_session=True,
                    stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=output))
                self._said.append(b"")

    def _answers(self) -> list[dict[str, Any]]:
        """One line of every rank."""
        deadline = time.monotonic() + self.patience
        with selectors.DefaultSelector() as waiting:
            for rank, process in enumerate(self.processes):
                assert process.stdout is not None
                waiting.register(process.stdout, selectors.EVENT_READ, rank)
            while waiting.get_map():
                ready = waiting.select(max(0.0, deadline - time.monotonic()))
                if not ready:
                    raise ArmFailed(f"gave no answer for {self.patience:g} seconds (bench.timing.patience).",
                                    Exit.CRASHED, self.name)
                for key, _ in ready:
                    self._hear(key.data, key.fd)
                    if self._said[key.data].endswith(b"\n"):
                        waiting.unregister(key.fileobj)
        lines, self._said = self._said, [b""] * len(self.processes)
        return [json.loads(line) for line in lines]

    def _hear(self, rank: int, pipe: int) -> None:
        said = os.read(pipe, 1 << 20)
        if not said:
            raise self._failure(rank)
        self._said[rank] += said

    def _failure(self, rank: int) -> ArmFailed:
        """What an arm died of, in its own words where it left any."""
        with suppress(subprocess.TimeoutExpired):
            self.processes[rank].wait(10)
        told = [Failure.read(self.trial.folder, number) for number in range(len(self.processes))]
        words = sorted((word for word in told if word is not None), key=lambda word: (word.lost_peer, word.time))
        if words:
            return ArmFailed(words[0].message, Exit(words[0].exit_code), self.name)
        code = self.processes[rank].poll()
        if code is not None and code < 0:
            name = signal.Signals(-code).name
            more = "; often the kernel, out of memory" if code == -signal.SIGKILL else ""
            return ArmFailed(f"was ended by signal {-code} ({name}{more}).", Exit.CRASHED, self.name)
        return ArmFailed(f"ended with exit code {code}. Its last words may be in {self.trial.folder / 'output.txt'}",
                         Exit.CRASHED, self.name)
