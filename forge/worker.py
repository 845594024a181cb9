"""One process of a run: read the frozen configuration, build every part, train.

forge.train starts it; on several nodes torchrun does: torchrun ... -m forge.worker RUN_DIR
"""

from __future__ import annotations

import sys
from pathlib import Path

from forge.config import Config, check, load
from forge.errors import Exit
from forge.failure import FirstFailure
from forge.process import die_with_parent, leave, log_threads, log_to, outlive_terminal, rank
from forge.stopping import Stopping
from forge.words import packages, split


def main() -> None:
    own, rest = split(sys.argv[1:])
    if len(rest) != 1:
        print("usage: python -m forge.worker RUN_DIR [allowed_packages=PACKAGE,...]", file=sys.stderr)
        sys.exit(Exit.USAGE)
    run_dir = Path(rest[0])
    stopping = Stopping.listening()     # before anything slow: a signal that comes during the imports must not be lost
    die_with_parent()
    outlive_terminal()
    log_threads()
    leave(work(run_dir, packages(own), stopping))


def work(run_dir: Path, allowed: tuple[str, ...], stopping: Stopping) -> Exit:
    """Train the run of this directory to its end, or to where it is stopped; an error is recorded, not raised."""
    failure = FirstFailure(run_dir, rank())
    try:
        with failure.recorded():
            config = load(run_dir, allowed)
            check(config)
            log_to(run_dir)
            config.prepare_environment()
            return _train(config, run_dir, stopping, failure)
    except Exception:
        return failure.exit_code or Exit.CRASHED


def _train(config: Config, run_dir: Path, stopping: Stopping, failure: FirstFailure) -> Exit:
    from forge.build import build
    from forge.observe.result import conclude

    with config.hardware.claim() as topology, build(config, topology, run_dir) as (trainer, run), failure.recorded():
        observers = [stopping, *run.observers]
        for step in trainer.steps(config.last_step):
            for observe in observers:
                trainer.ask(observe(step))
        stopped = run.progress.step < config.last_step
        conclude(run, observers, "stopped" if stopped else "finished")
    return stopping.exit_code if stopped else Exit.ANSWERED


if __name__ == "__main__":
    main()
