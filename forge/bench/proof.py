"""What forge.verify says about a switch: whether a gain is one of equal results."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

from forge.bench.trial import Trial
from forge.command_line import FOLDERS
from forge.errors import Exit
from forge.words import OWN

UNVERIFIED = "unverified"
ANSWERS = (Exit.ANSWERED, Exit.ASSERTION_FAILED, Exit.CANNOT_JUDGE)


def proof_problems(verify_seconds: float) -> Iterator[str]:
    if not verify_seconds > 0:
        yield f"bench.verify_seconds={verify_seconds}: more than 0 is wanted; bench.verify=false asks for no proof."


def prove(trial: Trial, baseline: Trial, seconds: float) -> dict[str, str | None]:
    """The columns of a row: the verdict of forge.verify and its reason, or unverified and why."""
    if find_spec("forge.verify") is None:
        return _unverified("forge.verify is not installed.")
    place = trial.folder / "verify"
    command = [sys.executable, "-m", "forge.verify", *trial.words, f"baseline={shlex.join(training_words(baseline))}",
               f"run_dir={place}"]
    try:
        code, said = _asked(command, seconds)
    except subprocess.TimeoutExpired:
        return _unverified(f"forge.verify took more than bench.verify_seconds={seconds:g}.")
    if code not in ANSWERS:
        return _unverified(f"forge.verify ended with exit code {code}{_cause(said)}")
    return _verdict(place)


def _verdict(place: Path) -> dict[str, str | None]:
    try:
        result = json.loads((place / "result.json").read_text())
        return {"verify": str(result["verdict"]), "verify_reason": result.get("reason")}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return _unverified(f"forge.verify left no verdict in {place}.")


def _asked(command: list[str], seconds: float) -> tuple[int, str]:
    """(its exit code, its standard error). Raises TimeoutExpired.

    It leads a session of its own, which is killed however this ends, so that nothing it started outlives it; and it is
    told whose child it is, so that it dies with a parent that is killed.
    """
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
                               text=True, errors="replace", start_new_session=True,
                               env=os.environ | {"FORGE_PARENT": str(os.getpid())})
    try:
        _, said = process.communicate(timeout=seconds)
        return process.returncode, said
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _cause(said: str) -> str:
    """Why it ended, out of its standard error: its last sentence that is not about where to read on."""
    lines = [line for line in said.strip().splitlines()
             if line.strip() and not line.startswith("The traceback is in ") and not line.endswith("(above).")]
    starts = [place for place, line in enumerate(lines) if line.startswith("forge: ")]
    cause = " ".join(lines[starts[-1]:] if starts else lines[-1:])
    return f": {cause}" if cause else "."


def training_words(trial: Trial) -> list[str]:
    """Without flags and what is consumed before composition: forge.verify takes those once, with the candidate's."""
    return [word for before, word in zip(["", *trial.words], trial.words, strict=False)
            if not word.startswith("-") and before not in FOLDERS and word.partition("=")[0] not in OWN]


def _unverified(why: str) -> dict[str, str | None]:
    return {"verify": UNVERIFIED, "verify_reason": why}
