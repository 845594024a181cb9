"""What forge.verify says about a switch: whether a gain is one of equal results."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from importlib.util import find_spec

from forge.bench.trial import Trial
from forge.command_line import FOLDERS
from forge.errors import Exit
from forge.words import OWN

UNVERIFIED = "unverified"
ANSWERS = (Exit.ANSWERED, Exit.ASSERTION_FAILED, Exit.CANNOT_JUDGE)


def prove(trial: Trial, baseline: Trial, seconds: float) -> dict[str, str | None]:
    """The columns of a row: the verdict of forge.verify and its reason, or unverified and why."""
    if find_spec("forge.verify") is None:
        return _unverified("forge.verify is not installed.")
    place = trial.folder / "verify"
    command = [sys.executable, "-m", "forge.verify", *trial.words, f"baseline={shlex.join(training_words(baseline))}",
               f"run_dir={place}"]
    try:        # in a session of its own: a Ctrl-C ends this process, which then ends that one
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, start_new_session=True)
    except subprocess.TimeoutExpired:
        return _unverified(f"forge.verify took more than bench.verify_seconds={seconds:g}.")
    if done.returncode not in ANSWERS:
        said = done.stderr.strip().splitlines()
        return _unverified(f"forge.verify ended with exit code {done.returncode}" + (f": {said[-1]}" if said else "."))
    try:
        result = json.loads((place / "result.json").read_text())
        return {"verify": str(result["verdict"]), "verify_reason": result.get("reason")}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return _unverified(f"forge.verify left no verdict in {place}.")


def training_words(trial: Trial) -> list[str]:
    """Without flags and what is consumed before composition: forge.verify takes those once, with the candidate's."""
    return [word for before, word in zip(["", *trial.words], trial.words, strict=False)
            if not word.startswith("-") and before not in FOLDERS and word.partition("=")[0] not in OWN]


def _unverified(why: str) -> dict[str, str | None]:
    return {"verify": UNVERIFIED, "verify_reason": why}
