"""What a run pays for being watched: the marks of the phases, the figures of the ledger, and the trackers."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

from forge.bench import Timing

if TYPE_CHECKING:
    from forge.bench.session import Resident, Session
    from forge.bench.turns import Block, Turn

WITH, WITHOUT = "with", "without"
STEP_MS = 20.0          # the step that the promise speaks of


@dataclass(frozen=True)
class Telemetry:
    """most: the share of a step of 20 ms that it may cost."""

    most: float
    timing: Timing

    def problems(self) -> Iterator[str]:
        yield from self.timing.problems()
        if not self.most > 0:
            yield f"bench.most={self.most}: more than 0 is wanted, for example 0.01."

    def __call__(self, session: Session) -> None:
        from forge.bench.session import BASELINE
        from forge.bench.trial import QUIET

        watched = {name: word for name, word in QUIET.items() if name != "tracker"}
        trial = session.composer.trial(BASELINE, quiet=watched)
        session.progress.measure(1)
        arm = session.baseline(trial, self.timing)
        every = trial.config.tracker.every
        steps = math.ceil(arm.steps / every) * every        # whole rounds: a turn must not miss the costly step
        blocks = session.blocks([Watched(WITH, arm, steps, True), Watched(WITHOUT, arm, steps, False)], self.timing)
        session.add(self._row(blocks, trial.config.tracker.options))

    def _row(self, blocks: list[Block], trackers: dict[str, Any]) -> dict[str, Any]:
        costs = [_step_ms(block, WITH) - _step_ms(block, WITHOUT) for block in blocks]
        without = median(_step_ms(block, WITHOUT) for block in blocks)
        cost = _interval(costs, 1.0)
        of_twenty = _interval(costs, STEP_MS)
        verdict = f"below {self.most:.1%}" if of_twenty["high"] < self.most else \
            f"above {self.most:.1%}" if of_twenty["low"] > self.most else "not proven"
        return {"name": ", ".join(["marks", "ledger", *trackers]), "kind": "telemetry", "status": "measured",
                "with_ms": median(_step_ms(block, WITH) for block in blocks), "without_ms": without, "cost_ms": cost,
                "share": _interval(costs, without), "share_of_20_ms": of_twenty, "verdict": verdict,
                "blocks": len(blocks)}


@dataclass(frozen=True)
class Watched:
    """An arm, with or without what watches it: both sides are one process, so nothing else differs."""

    name: str
    arm: Resident
    steps: int
    telemetry: bool

    def turn(self) -> Turn:
        from forge.bench.turns import Turn

        return Turn(**self.arm.ask("untold", settle=self.arm.settle, steps=self.steps, telemetry=self.telemetry))


def _step_ms(block: Block, name: str) -> float:
    """Over both turns of a side."""
    mine = [turn for other, turn in zip(block.order, block.turns, strict=True) if other == name]
    return sum(sum(turn.lengths) for turn in mine) / sum(len(turn.lengths) for turn in mine)


def _interval(costs: list[float], unit: float) -> dict[str, float]:
    from forge.bench.statistics import Estimate

    estimate = Estimate.of([cost / unit for cost in costs])
    assert estimate.low is not None and estimate.high is not None       # there are four blocks at least
    return {"estimate": estimate.mean, "low": estimate.low, "high": estimate.high}
