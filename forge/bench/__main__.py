"""python -m forge.bench [bench=ablation|path|micro|experts|augment|telemetry|aa] [bench.SETTING=VALUE ...]
                      [run_dir=DIR] [--json] [the settings of the baseline, as for forge.train ...]

    bench=ablation    what each switch is worth: alone, all together, and left out (bench.switches=[...])
    bench=path        a list of experiments, each against the one before and the first (bench.path=[...])
    bench=micro       what this machine can do, at the shapes of this model
    bench=experts     a layer of mixed experts by each router, and as others compute it, beside a dense layer
    bench=augment     pictures a second of each way to augment them
    bench=telemetry   what the marks, figures and trackers cost
    bench=aa          the baseline against itself: the noise of this machine

A switch is a string of training words: 'bench.switches=[compile=blocks,precision=bf16 precision.residual=bfloat16]'.
The record goes to run_dir (runs/bench_<time>): result.json, report.md and a picture. draw=DIR draws the picture of a
record later. Exit codes: 0 answered, 2 something typed is wrong, 4 too noisy to judge, 5 this machine cannot, 75
stopped by a signal, 130 interrupted; what was measured by then is in the record.
"""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from forge.bench.plot import draw
from forge.bench.progress import Progress
from forge.bench.record import SCHEMA, Record
from forge.bench.report import print_report, write_report
from forge.bench.request import Request
from forge.bench.session import Session, matmul_rate
from forge.bench.surroundings import check_free
from forge.bench.trial import Composer
from forge.errors import ConfigError, Exit, ForgeError, UnusableEnvironment
from forge.freeze import owned
from forge.process import outlive_terminal
from forge.stopping import heeded
from forge.words import reporting


class Stopped(KeyboardInterrupt):
    """A signal that asks for a stop: as a Ctrl-C, with an exit code of its own."""


def main() -> None:
    outlive_terminal()
    stops = [number for number in heeded() if number != signal.SIGINT]

    def stop(number: int, frame: FrameType | None) -> NoReturn:
        for other in stops:             # what is written now is not to be cut short by a second one
            signal.signal(other, signal.SIG_IGN)
        raise Stopped

    for number in stops:
        signal.signal(number, stop)
    with reporting(__doc__):
        try:
            sys.exit(run(sys.argv[1:]))
        except Stopped:                 # before there is a record
            sys.exit(Exit.STOPPED)


def run(arguments: list[str]) -> Exit:
    """Measure what the words ask for. Raises ForgeError, after what was measured is written and shown."""
    drawn = [word.partition("=")[2] for word in arguments if word.startswith("draw=")]
    if drawn:
        return redraw(Path(drawn[-1]))
    request = Request.parse(arguments)
    if (request.run_dir / "result.json").exists():
        raise ConfigError(f"run_dir={request.run_dir} already holds a record: name another.")
    composer = Composer(request.words, request.allowed, request.run_dir)
    baseline = composer.trial("the baseline")
    if baseline.problem:
        raise ConfigError(f"the baseline does not run: {baseline.problem}")
    for trial in getattr(request.bench, "trials", lambda composer: ())(composer):
        if trial.problem:
            print(f"forge: {trial.name} will not be measured: {trial.problem}", file=sys.stderr)
    matmul_rate(getattr(request.bench, "micro", None))      # read again by the option; a mistake is to be known now
    composer.made = 0
    check_free(baseline.config)
    with owned(request.run_dir):
        record = Record.begun(request.run_dir, request.option, request.words, request.settings)
        session = Session(composer, record, Progress(), request.allowed)
        with _ended(session), _shown(record, request.on_stdout):
            request.bench(session)
            record.end("finished", Exit.CANNOT_JUDGE if record.facts["abstained"] else Exit.ANSWERED)
        return Exit(record.facts["exit_code"])


def redraw(run_dir: Path) -> Exit:
    """The picture of a record. Raises ForgeError."""
    try:
        result = json.loads((run_dir / "result.json").read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"draw={run_dir} holds no record that can be read: {error}") from None
    if not isinstance(result, dict) or result.get("schema") != SCHEMA:
        raise ConfigError(f"draw={run_dir} was not written by this command: its schema is not {SCHEMA}.")
    missing = draw(result, run_dir)
    if missing:
        raise UnusableEnvironment(missing)
    print(run_dir / f"{result['mode']}.png")
    return Exit.ANSWERED


@contextmanager
def _ended(session: Session) -> Iterator[None]:
    """No arm outlives the command, whatever happens."""
    try:
        yield
    finally:
        session.end()
        session.progress.close()


@contextmanager
def _shown(record: Record, on_stdout: bool) -> Iterator[None]:
    """What was measured is written and shown, also where the bench does not come to its end."""
    try:
        yield
    except Stopped:
        record.end("stopped", Exit.STOPPED)
    except KeyboardInterrupt:
        record.end("interrupted", Exit.INTERRUPTED)
    except ForgeError as error:
        record.end("failed", error.exit_code, str(error))
        _conclude(record, on_stdout, quiet=True)
        raise
    except OSError as error:
        record.end("failed", Exit.ENVIRONMENT, f"{error.filename or 'a file'} cannot be used: {error.strerror}.")
        _conclude(record, on_stdout, quiet=True)
        raise
    except Exception as error:
        record.end("crashed", Exit.CRASHED, f"{type(error).__name__}: {error}")
        _conclude(record, on_stdout, quiet=True)
        raise
    _conclude(record, on_stdout)


def _conclude(record: Record, on_stdout: bool, quiet: bool = False) -> None:
    """quiet: the record could not be written, or there is an error that matters more than one in here."""
    failure: ForgeError | None = None
    try:
        record.look()
        record.write()
        record.facts["picture_reason"] = draw(record.result, record.run_dir)
        write_report(record.run_dir / "report.md", record.result)
        record.write()
    except UnusableEnvironment as error:
        failure = error
    except OSError as error:
        failure = UnusableEnvironment(f"run_dir={record.run_dir}: {error.strerror} ({error.filename}).")
    result: dict[str, Any] = record.result
    if on_stdout:
        print(json.dumps(result, indent=1))
    elif result["rows"] or not quiet:
        print_report(result, record.run_dir)
    if failure and not quiet:
        raise failure


if __name__ == "__main__":
    main()
