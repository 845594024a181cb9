"""python -m forge.evaluate from=RUN [split=heldout] [batches=0]

The loss of a run's newest snapshot (or of the snapshot that `from` names). batches=0 takes the whole split. Other
words override settings of the run, as for forge.train.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from forge.errors import ConfigError, Exit
from forge.words import packages, reporting, split, take

SETTINGS: dict[str, Any] = {"split": "heldout", "batches": 0}


def main() -> None:
    with reporting(__doc__):
        sys.exit(evaluate(sys.argv[1:]))


def evaluate(arguments: list[str]) -> Exit:
    """Print the loss in nats per token. Raises ForgeError."""
    own, rest = split(arguments)
    if "from" not in own:
        raise ConfigError(f"from= is missing: name a run directory.\n{__doc__}")
    asked, overrides = take(SETTINGS, rest)
    if asked["split"] not in ("train", "heldout"):
        raise ConfigError(f"split={asked['split']}: train or heldout is wanted.")
    if asked["batches"] < 0:
        raise ConfigError(f"batches={asked['batches']}: 0, for the whole split, or more is wanted.")
    from forge.observe.evaluate import Judge
    from forge.restore import restored

    with restored(Path(own["from"]), overrides, packages(own)) as run:
        judge = Judge.of(run.config, run.topology, asked["split"])
        loss, targets = judge.mean_loss(run.model, asked["batches"] or None, progress=True)
        unit = "byte" if run.config.data.tokenizer == "bytes" else "token"
        print(f"{asked['split']} loss {loss:.6f} nats a {unit} over {targets:,} {unit}s, of {run.snapshot}")
    return Exit.ANSWERED


if __name__ == "__main__":
    main()
