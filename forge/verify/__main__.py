"""python -m forge.verify WORDS [baseline='WORDS'] [verify=gradients|converge] [run_dir=DIR] [declared=SETTING,...]

Did these words change the maths? WORDS are overrides as for forge.train: the candidate. It is compared with the run
that baseline= describes, whole; without it, with the run without any words. from=RUN is the starting point of both.

    python -m forge.verify operators=handwritten
    python -m forge.verify precision=bf16 attention=flash baseline='precision=bf16 attention=eager'

verify.SETTING=VALUE sets what conf/verify/ holds. declared= names settings that are meant to change the maths. --json
prints result.json. Exit codes: 0 the same, or different by design; 3 different; 4 cannot judge; 2 a mistake in the
words; 75 ended by SIGTERM; 130 by Ctrl-C.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from forge.config import option_of
from forge.errors import ConfigError, Exit, UnusableEnvironment
from forge.freeze import owned
from forge.process import die_with_parent, log_to
from forge.stopping import heeded
from forge.verify import Verify
from forge.verify.pair import Pair
from forge.verify.run_side import Terminated
from forge.verify.words import Words, settings
from forge.words import reporting


def main() -> None:
    if os.environ.get("FORGE_PARENT"):
        die_with_parent()
    for number in heeded():
        if number != signal.SIGINT:
            signal.signal(number, _terminate)
    with reporting(__doc__):
        try:
            code = verify(sys.argv[1:])
        except Terminated:
            code = Exit.STOPPED
        sys.exit(code)


def _terminate(number: int, frame: Any) -> None:
    raise Terminated


def verify(arguments: list[str]) -> Exit:
    """Compare, write result.json and report.md, and print the table. Raises ForgeError."""
    as_json = "--json" in arguments
    words = Words.of([word for word in arguments if word != "--json"])
    values = settings(words)
    how = option_of("verify", Verify, values, words.allowed)
    pair = Pair.of(words)
    mistakes = list(getattr(how, "problems", lambda config: ())(pair.baseline.config))
    if mistakes:
        raise ConfigError("\n".join(mistakes))
    for side in pair.sides[::-1]:
        side.config.prepare_environment()
    with owned(words.run_dir):
        return _compare(how, pair, words.run_dir, values, as_json)


def _compare(how: Verify, pair: Pair, run_dir: Path, values: dict[str, object], as_json: bool) -> Exit:
    from forge.verify.record import Record
    from forge.verify.report import print_table, write_report

    _fresh(run_dir)
    log_to(run_dir)
    record = Record(run_dir, pair, str(values["_target_"]).rpartition(".")[2].lower(), values)
    record.write()
    try:
        verdict = how(pair, record)
        record.conclude(verdict)
        write_report(record)
    except BaseException as error:
        record.status = "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"
        record.error = str(error) or None
        with suppress(OSError):
            record.write()
        raise
    finally:
        shutil.rmtree(run_dir / "scratch", ignore_errors=True)
    if as_json:
        print(record.path.read_text(), end="")
    else:
        print_table(record)
    return verdict.exit_code


def _fresh(run_dir: Path) -> None:
    """A comparison that did not end may be made again in the same place. Raises ForgeError."""
    before = run_dir / "result.json"
    if (run_dir / "config.yaml").exists() or (before.exists() and _finished(before)):
        raise ConfigError(f"run_dir={run_dir} already holds a run or a comparison: name another.")
    try:
        (run_dir / "scratch").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UnusableEnvironment(f"run_dir={run_dir} cannot be written: {error.strerror}.") from None


def _finished(result: Path) -> bool:
    try:
        return json.loads(result.read_text()).get("status") not in ("running", "failed", "interrupted")
    except (ValueError, AttributeError):
        return True


if __name__ == "__main__":
    main()
