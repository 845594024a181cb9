"""One resident process of an arm: python -m forge.bench.arm RUN_DIR [allowed_packages=PACKAGE,...]

Builds what the run directory's configuration says and trains it when it is told to: one line of JSON on the standard
input asks, one on the standard output answers. The first line out says what was built, after the first update.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from forge.config import Config, check, load
from forge.errors import Exit
from forge.failure import FirstFailure
from forge.process import die_with_parent, leave, log_threads, log_to, rank
from forge.words import packages, split

if TYPE_CHECKING:
    from forge.bench.driver import Driver
    from forge.run import Run

Answer = dict[str, Any]


def main() -> None:
    own, (place,) = split(sys.argv[1:])
    signal.signal(signal.SIGINT, signal.SIG_IGN)        # the command that drives us decides when to end
    die_with_parent()
    log_threads()
    run_dir, allowed = Path(place), packages(own)
    failure = FirstFailure(run_dir, rank())
    try:
        with failure.recorded():
            config = load(run_dir, allowed)
            check(config)
            log_to(run_dir)
            config.prepare_environment()
            _serve(config, run_dir, allowed, failure)
    except Exception:
        leave(failure.exit_code or Exit.CRASHED)


def _serve(config: Config, run_dir: Path, allowed: tuple[str, ...], failure: FirstFailure) -> None:
    answers = _own_stdout()
    from forge.bench.driver import Driver
    from forge.build import build

    with config.hardware.claim() as topology:
        begun = time.perf_counter()
        with build(config, topology, run_dir) as (trainer, run), failure.recorded():
            driver = Driver(trainer, run)
            driver.turn(0, 1)
            _tell(answers, {"startup_seconds": time.perf_counter() - begun, **_facts(driver)})
            for line in sys.stdin:
                asked = json.loads(line)
                _tell(answers, _answer(driver, asked.pop("do"), asked, allowed))


def _answer(driver: Driver, do: str, asked: dict[str, Any], allowed: tuple[str, ...]) -> Answer:
    if do == "probe":
        from forge.bench.probes import probe

        return {"rows": probe(driver, asked["family"], asked["settings"], allowed)}
    turns: dict[str, Callable[..., Answer]] = {"turn": driver.turn, "untold": driver.untold}
    return turns[do](**asked)


def _facts(driver: Driver) -> Answer:
    """What the parent, which never imports torch, cannot know."""
    import torch

    run = driver.run
    device, on_gpu = run.topology.device, run.topology.device.type == "cuda"
    cost: Any = run.model.flops_per_token
    return {"device": {"type": device.type, "count": run.topology.world_size,
                       "name": torch.cuda.get_device_name(device) if on_gpu else None,
                       "uuid": str(torch.cuda.get_device_properties(device).uuid) if on_gpu else None,
                       "peak_flops": _peak(run), "threads": torch.get_num_threads()},
            "versions": {"cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version() if on_gpu else None,
                         "nccl": ".".join(map(str, torch.cuda.nccl.version())) if on_gpu else None},
            "flops_per_token": float(cost(run.config.sequence_length)),
            "parameters": sum(weight.numel() for weight in run.model.parameters())}


def _peak(run: Run) -> float | None:
    """FLOP/s, of which MFU is a share."""
    from forge.observe.flops import peak_flops

    return peak_flops(run.topology.device, getattr(run.config.hardware, "peak_tflops", None))


def _own_stdout() -> TextIO:
    """The pipe to the parent, for the answers alone: what anything prints goes to the file that stderr is."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    return answers


def _tell(answers: TextIO, answer: Answer) -> None:
    answers.write(json.dumps(answer) + "\n")
    answers.flush()


if __name__ == "__main__":
    main()
