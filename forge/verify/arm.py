"""One side of a comparison: its jobs, run by the real parts of a run, in this process or in as many as it trains with.

The command starts it where a side has several processes: python -m forge.verify.arm FOLDER
"""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forge.config import Config, load
from forge.errors import Exit
from forge.failure import FirstFailure
from forge.process import die_with_parent, leave, log_to, outlive_terminal, rank
from forge.stopping import SIGNALS
from forge.verify.job import Job, read_jobs
from forge.words import packages, split

if TYPE_CHECKING:
    from forge.hardware import Topology

OF_A_JOB = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")


def main() -> None:
    own, rest = split(sys.argv[1:])
    if len(rest) != 1:
        print("usage: python -m forge.verify.arm FOLDER [allowed_packages=PACKAGE,...]", file=sys.stderr)
        sys.exit(Exit.USAGE)
    for number in SIGNALS:
        signal.signal(number, _stop)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    die_with_parent()
    outlive_terminal()
    leave(work(Path(rest[0]), packages(own)))


def _stop(number: int, frame: Any) -> None:
    # nothing here is worth saving; other ranks may wait in a collective
    leave(Exit.INTERRUPTED if number == signal.SIGINT else Exit.STOPPED)


def work(folder: Path, allowed: tuple[str, ...]) -> Exit:
    """Do the jobs of this folder; an error is recorded, not raised."""
    failure = FirstFailure(folder, rank())
    try:
        with failure.recorded():
            config = load(folder, allowed)
            log_to(folder)
            config.prepare_environment()
            run(config, folder, read_jobs(folder))
            return Exit.ANSWERED
    except Exception:
        return failure.exit_code or Exit.CRASHED


def run(config: Config, folder: Path, jobs: list[Job]) -> None:
    """One job after the other, each leaving folder/<job>/figures.json. Raises ForgeError."""
    from forge.verify.gradients_of import measure_gradients
    from forge.verify.training import measure_training
    from forge.verify.update_of import measure_update

    measures = {"gradients": measure_gradients, "update": measure_update, "training": measure_training}
    with config.hardware.claim() as topology:
        for job in jobs:
            out = folder / job.name
            if topology.is_first:
                out.mkdir(parents=True, exist_ok=True)
            try:
                figures = measures[job.what](config, job, topology, out)
            except SystemExit as error:     # an option's own exit code would be taken for a verdict
                raise RuntimeError(f"sys.exit({error.code!r}) was called") from error
            if topology.is_first:
                (out / "figures.json").write_text(json.dumps(figures))
            _free(topology)


@contextmanager
def alone() -> Iterator[None]:
    """For a side that is run in the command's own process: no rank of a job this command was typed in, and afterwards
    torch's process-wide modes as they were."""
    import torch

    for name in OF_A_JOB:
        os.environ.pop(name, None)
    threads, products = torch.get_num_threads(), torch.get_float32_matmul_precision()
    deterministic, tf32 = torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.allow_tf32
    try:
        with torch.random.fork_rng([]):
            yield
    finally:
        torch.set_num_threads(threads)
        torch.set_float32_matmul_precision(products)
        torch.use_deterministic_algorithms(deterministic)
        torch.backends.cudnn.allow_tf32 = tf32


def _free(topology: Topology) -> None:
    """The next job builds a model of its own, and compiles it: what was compiled before counts against a limit, beyond
    which PyTorch would run it uncompiled without a word."""
    import torch

    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()

    if topology.device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
