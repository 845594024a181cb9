"""python -m forge.train precision=bf16 attention=flash moe_router=fused

Composes the run once, checks it, freezes it into a run directory, and starts the workers on it.
"""

from __future__ import annotations

import os
import sys

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from forge.command_line import CommandLine
from forge.config import check, conf_dir, realise
from forge.errors import ConfigError, Exit
from forge.freeze import freeze, owned
from forge.sweep import Sweep
from forge.words import reporting


def main() -> None:
    with reporting():
        sys.exit(train(sys.argv[1:]))


def train(arguments: list[str]) -> Exit:
    """Run what the command line asks for: one run, or one for each value of a sweep."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        raise ConfigError("forge.train starts the workers itself. Inside torchrun, start them on a frozen run "
                          "directory: torchrun ... -m forge.worker RUN_DIR (launch=torchrun makes one).")
    line = CommandLine.parse(arguments)
    outcomes: list[Exit | Exception] = []
    sweep = Sweep(line.arguments)

    def job(composed: DictConfig) -> None:
        """One run. Hydra calls this once, or once for each point of a sweep."""
        if HydraConfig.get().mode is RunMode.MULTIRUN:
            sweep.add(lambda: start(composed, line))
            return
        try:
            outcomes.append(start(composed, line))
        except Exception as error:      # Hydra would print a line of its own before passing it on
            outcomes.append(error)

    line.compose(hydra.main(version_base="1.3", config_path=conf_dir(), config_name="train")(job))
    if sweep.points:
        sweep.print_table()
        return sweep.exit_code()
    outcome = outcomes[0] if outcomes else Exit.ANSWERED
    if isinstance(outcome, Exception):
        raise outcome
    return outcome


def start(composed: DictConfig, line: CommandLine) -> Exit:
    """Check the run, freeze it, and hand it to its launcher. Nothing is written before the check has passed."""
    settings, run_dir = line.settle(composed)
    config = realise(settings, line.allowed)
    check(config)
    line.check_ahead(config)
    line.note_unused(config)
    with owned(run_dir):
        replaced = freeze(settings, run_dir)
        code = config.launch(run_dir, config, line.allowed)
        if replaced and code is Exit.USAGE and line.went_no_further():
            os.replace(replaced, run_dir / "config.yaml")       # the workers refused it: the run is as it was
        return code


if __name__ == "__main__":
    main()
