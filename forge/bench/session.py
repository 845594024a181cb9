"""What an option measures with: trials that become resident arms, turns of them, and the record of both."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from forge.bench import Timing
from forge.bench.progress import Progress
from forge.bench.record import Record
from forge.bench.resident import Arm, ArmFailed
from forge.bench.statistics import steady_from
from forge.bench.trial import Composer, Trial
from forge.bench.turns import Block, Side, Turn, take_blocks
from forge.errors import ConfigError, ForgeError

BASELINE = "baseline"


class BaselineFailed(ForgeError):
    """Nothing can be compared with it."""

    def __init__(self, failure: ArmFailed, name: str) -> None:
        super().__init__(f"the {name} does not run: {failure}")
        self.exit_code = failure.exit_code


class Resident:
    """An arm that is warm: a side of a comparison."""

    def __init__(self, arm: Arm, timing: Timing) -> None:
        """Raises ArmFailed."""
        self.arm, self.timing = arm, timing
        self.name, self.facts = arm.name, arm.facts
        self.warmup: list[float] = []
        self.dropped, tokens = 0, 0.0
        while len(self.warmup) < timing.warmup_most:
            turn = Turn(**self.ask("turn", settle=0, steps=timing.warmup))
            self.warmup += turn.lengths
            tokens += turn.tokens
            self.dropped = steady_from(self.warmup, timing.warmup)
            if len(self.warmup) >= self.dropped + timing.warmup:
                break
        self.tokens_per_step = tokens / len(self.warmup)
        steady = self.warmup[min(self.dropped, len(self.warmup) - 1):]
        self.steps = timing.steps_of_a_turn(sum(steady) / len(steady) / 1e3)
        self.settle = min(timing.settle, self.steps)
        self.peak_memory: int | None = None     # bytes, once it has taken turns

    def turn(self) -> Turn:
        return Turn(**self.ask("turn", settle=self.settle, steps=self.steps))

    def ask(self, do: str, **asked: Any) -> dict[str, Any]:
        """Raises ArmFailed."""
        return self.arm.ask(do, **asked)

    def record(self) -> dict[str, Any]:
        return {**self.facts, "warmup_ms": self.warmup, "warmup_steps_dropped": self.dropped,
                "tokens_per_step": self.tokens_per_step, "steps_per_turn": self.steps}


@dataclass
class Session:
    """composer: makes trials. arms: those that run now; whatever happens, they end with the session."""

    composer: Composer
    record: Record
    progress: Progress
    allowed: tuple[str, ...]
    arms: list[Arm] = field(default_factory=list)

    def start(self, trial: Trial, patience: float, cold: bool) -> Arm:
        """The processes of a trial, after their first update. Raises ArmFailed."""
        noted = self.record.arm(trial.name, trial.record())
        if trial.problem is not None:
            raise ArmFailed(trial.problem, ConfigError.exit_code, trial.name)
        trial.freeze()
        self.progress.tell(trial.name, "starting")
        arm = Arm(trial, patience, cold, self.allowed, self.arms)
        noted |= arm.facts
        if self.record.facts["device"] is None:
            self.record.facts["device"] = arm.facts["device"] | {"cuda": arm.facts["versions"]}
        return arm

    def open(self, trial: Trial, timing: Timing) -> Resident:
        """Raises ArmFailed."""
        arm = self.start(trial, timing.patience, timing.cold)
        try:
            self.progress.tell(trial.name, "warming up")
            resident = Resident(arm, timing)
        except ArmFailed:
            arm.end()
            raise
        self.record.arms[trial.name] |= resident.record()
        return resident

    @contextmanager
    def resident(self, trial: Trial, timing: Timing) -> Iterator[Resident]:
        resident = self.open(trial, timing)
        try:
            yield resident
        finally:
            resident.arm.end()

    def baseline(self, trial: Trial, timing: Timing) -> Resident:
        """Raises BaselineFailed."""
        try:
            return self.open(trial, timing)
        except ArmFailed as failure:
            raise BaselineFailed(failure, trial.name) from None

    def blocks(self, sides: Sequence[Side], timing: Timing) -> list[Block]:
        """Turns of the sides, noted in the record with every step. Raises ArmFailed."""
        def told(number: int, name: str) -> None:
            self.progress.tell(sides[-1].name, f"block {number + 1} of {timing.blocks}")

        with self.record.watched():
            blocks = take_blocks(sides, timing.blocks, timing.spare, told)
        self.record.comparisons.append({"sides": [side.name for side in sides],
                                        "blocks": [block.record() for block in blocks]})
        self.record.look()
        return blocks

    def add(self, row: dict[str, Any]) -> None:
        """A finished row of the table."""
        self.record.rows.append(row)
        self.record.write()
        self.progress.done()

    def end(self) -> None:
        for arm in list(self.arms):
            arm.end()


def matmul_rate(micro: str | None) -> float | None:
    """FLOP/s that a bench=micro record measured at its best. Raises ConfigError."""
    if micro is None:
        return None
    path = Path(micro)
    path = path / "result.json" if path.is_dir() else path
    try:
        found = json.loads(path.read_text())
        if found["schema"] != "forge.bench/1" or found["mode"] != "micro":
            raise ConfigError(f"bench.micro={micro} is not a record of bench=micro.")
        rates = [row["flops_per_second"] for row in found["rows"]
                 if row["family"] == "matmul" and row.get("flops_per_second")]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"bench.micro={micro} cannot be read: {error}. Name the run directory of a "
                          f"bench=micro.") from None
    if not rates:
        raise ConfigError(f"bench.micro={micro} holds no matmul rate.")
    return max(float(rate) for rate in rates)
