"""A list of experiments, each against the one before it and against the first."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from forge.bench import Timing
from forge.bench.aa import floor_problems
from forge.bench.proof import proof_problems
from forge.bench.trial import switched

if TYPE_CHECKING:
    from forge.bench.compare import Judge
    from forge.bench.session import Resident, Session
    from forge.bench.trial import Composer, Trial


@dataclass(frozen=True)
class Path:
    """path: each a string of training overrides, on top of the words of the command line. resident: how many of them
    hold memory at once. verify: ask forge.verify what each changes in the results of the one it is held
    against, within verify_seconds. max_floor, micro: see forge.bench.aa."""

    path: list[str]
    resident: Literal[2, 3]
    verify: bool
    verify_seconds: float
    max_floor: float
    micro: str | None
    timing: Timing

    def problems(self) -> Iterator[str]:
        yield from self.timing.problems()
        yield from floor_problems(self.max_floor)
        if len(self.path) < 2:
            yield f"bench.path={self.path}: two steps at least are wanted."
        for step in sorted({step for step in self.path if self.path.count(step) > 1}):
            yield f"bench.path names {step} more than once: a step is one row."
        yield from proof_problems(self.verify_seconds)

    def trials(self, composer: Composer) -> list[Trial]:
        """Every step. Raises ConfigError."""
        return [switched(composer, "bench.path", step, step) for step in self.path]

    def __call__(self, session: Session) -> None:
        from forge.bench.compare import Judge, find_floor, note_smallest
        from forge.bench.session import matmul_rate

        judge = Judge(self.timing, self.max_floor, matmul_rate(self.micro))
        trials = self.trials(session.composer)
        again = session.composer.trial(f"{self.path[0]} again", self.path[0])
        session.progress.measure(len(trials), then="verifying" if self.verify else "")
        first = session.baseline(trials[0], self.timing)
        session.progress.start_over()
        find_floor(session, judge, first, again)
        before = first
        for trial in trials[1:]:
            first, before = self._step(session, judge, trial, first, before)
        note_smallest(session, judge)
        session.end()
        if self.verify:
            self._prove(session, trials)

    def _step(self, session: Session, judge: Judge, trial: Trial, first: Resident,
              before: Resident) -> tuple[Resident, Resident]:
        """Adds the row of a step; (the first, what the next step is held against)."""
        from forge.bench.compare import failed, outcome, restart
        from forge.bench.resident import ArmFailed

        row: dict[str, Any] = {"name": trial.name, "kind": "step", "against": before.name, "words": trial.words,
                               "verdict": None}
        beside = [before] if before is first or self.resident == 2 else [first, before]
        try:
            now = session.open(trial, self.timing)
            blocks = session.blocks([*beside, now], self.timing)
        except ArmFailed as failure:
            session.add(row | failed(failure, trial.name, *beside))
            lost = [side for side in beside if side.name == failure.arm]
            for arm in [arm for arm in session.arms if arm.name == trial.name]:
                arm.end()
            fresh = {side.name: restart(session, judge, side) for side in lost}
            return fresh.get(first.name, first), fresh.get(before.name, before)
        row |= outcome(now, before, blocks, judge)
        row["over_first"] = outcome(now, first, blocks, judge).get("gain") if first in beside else None
        session.add(row)
        if before is not first or self.resident == 2:
            before.arm.end()
        return first, now

    def _prove(self, session: Session, trials: list[Trial]) -> None:
        from forge.bench.proof import prove

        named = {trial.name: trial for trial in trials}
        ran = [row for row in session.record.rows
               if row["kind"] == "step" and row["status"] in ("measured", "disturbed")]
        session.progress.measure(len(ran))
        for row in ran:
            session.progress.tell(row["name"], "verifying")
            row |= prove(named[row["name"]], named[row["against"]], self.verify_seconds)
            session.record.write()
            session.progress.done()
