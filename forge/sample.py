"""python -m forge.sample from=RUN prompt="def " [length=200] [temperature=0.8] [top_k=40] [seed=0]

Continues a text with the model of a run. Other words override settings of the run, as for forge.train.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from forge.errors import ConfigError, Exit
from forge.observe.sampling import SAMPLING, continue_text
from forge.words import packages, reporting, split, take

SETTINGS: dict[str, Any] = {"prompt": "def ", "length": 200, **SAMPLING, "seed": 0}


def main() -> None:
    with reporting(__doc__):
        sys.exit(sample(sys.argv[1:]))


def sample(arguments: list[str]) -> Exit:
    """Print the prompt and its continuation. Raises ForgeError."""
    own, rest = split(arguments)
    if "from" not in own:
        raise ConfigError(f"from= is missing: name a run directory.\n{__doc__}")
    asked, overrides = take(SETTINGS, rest)
    for name, least in (("length", 1), ("temperature", 0.0), ("top_k", 1)):
        if not asked[name] >= least:
            raise ConfigError(f"{name}={asked[name]}: at least {least} is wanted.")
    if not 0 <= asked["seed"] < 2**63:
        raise ConfigError(f"seed={asked['seed']}: 0 or more, and less than 2^63, is wanted.")
    from forge.restore import restored

    with restored(Path(own["from"]), overrides, packages(own)) as run:
        print(continue_text(run.model, run.config, run.topology.device, **asked))
    return Exit.ANSWERED


if __name__ == "__main__":
    main()
