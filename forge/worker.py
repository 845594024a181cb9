"""One process of a run: read the frozen configuration, build every part, train.

forge.train starts it; on several nodes torchrun does: torchrun ... -m forge.worker RUN_DIR
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from forge.config import Config, check, load
from forge.errors import ConfigError, Exit
from forge.failure import record_failure
from forge.process import die_with_parent, log_to, rank
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
    sys.exit(work(run_dir, packages(own), stopping))


def work(run_dir: Path, allowed: tuple[str, ...], stopping: Stopping) -> Exit:
    """Train the run of this directory to its end, or to where it is stopped; an error is recorded, not raised."""
    try:
        config = load(run_dir, allowed)
        check(config)
        log_to(run_dir)
        os.environ.update(config.hardware.environment())        # read when torch is imported, below
        if config.reproducible:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")     # what cuBLAS needs to repeat its bits
        return _train(config, run_dir, stopping)
    except Exception as error:
        code = record_failure(run_dir, rank(), error) if run_dir.is_dir() else ConfigError.exit_code
        if "FORGE_PARENT" not in os.environ:                    # nobody else will tell the user
            print(f"forge: worker {rank()}: {error}", file=sys.stderr)
        return code


def _train(config: Config, run_dir: Path, stopping: Stopping) -> Exit:
    from forge.build import build
    from forge.observe.result import conclude

    with config.hardware.claim() as topology, build(config, topology, run_dir) as (trainer, run):
        observers = [stopping, *run.observers]
        for step in trainer.steps(config.last_step):
            for observe in observers:
                trainer.ask(observe(step))
        stopped = run.progress.step < config.last_step
        conclude(run, observers, "stopped" if stopped else "finished")
    return stopping.exit_code if stopped else Exit.ANSWERED


if __name__ == "__main__":
    main()
