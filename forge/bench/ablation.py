"""What each switch is worth: alone, all together, and left out of all."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from forge.bench import Timing
from forge.bench.aa import floor_problems
from forge.bench.proof import proof_problems
from forge.bench.trial import switched, words_of
from forge.errors import ConfigError

if TYPE_CHECKING:
    from forge.bench.compare import Judge
    from forge.bench.session import Resident, Session
    from forge.bench.trial import Composer, Trial

ALL = "all"
RAN = ("measured", "disturbed")


@dataclass(frozen=True)
class Ablation:
    """switches: each a string of training overrides. verify: ask forge.verify for each of them what it changes in the
    results, within verify_seconds. max_floor, micro: see forge.bench.aa."""

    switches: list[str]
    verify: bool
    verify_seconds: float
    max_floor: float
    micro: str | None
    timing: Timing

    def problems(self) -> Iterator[str]:
        yield from self.timing.problems()
        yield from floor_problems(self.max_floor)
        if not self.switches:
            yield "bench.switches=[]: name one at least, for example bench.switches=[compile=blocks]."
        for switch in sorted({switch for switch in self.switches if self.switches.count(switch) > 1}):
            yield f"bench.switches names {switch} more than once: a switch is one row."
        yield from proof_problems(self.verify_seconds)

    def trials(self, composer: Composer) -> list[Trial]:
        """Each switch alone. Raises ConfigError."""
        return [switched(composer, "bench.switches", switch, switch) for switch in self.switches]

    def __call__(self, session: Session) -> None:
        from forge.bench.compare import Judge, compare, find_floor, note_smallest
        from forge.bench.session import BASELINE, matmul_rate

        judge = Judge(self.timing, self.max_floor, matmul_rate(self.micro))
        first, again = session.composer.trial(BASELINE), session.composer.trial("baseline again")
        alone = self.trials(session.composer)
        session.progress.measure(1 + len(alone) + (1 + len(alone) if len(alone) > 1 else 0),
                                 then="verifying" if self.verify else "")

        baseline = session.baseline(first, self.timing)
        session.progress.start_over()
        find_floor(session, judge, baseline, again)
        for trial in alone:
            row, baseline = compare(session, judge, trial, baseline, "alone")
            session.add(row)
        if len(alone) > 1:
            reached, baseline = self._together(session, judge, baseline)
            baseline.arm.end()
            if reached is not None:
                self._left_out(session, judge, reached)
        session.end()
        note_smallest(session, judge)
        session.record.facts["overlap"] = overlap(session.record.rows, session.record.facts.get("floor"))
        if self.verify:
            self._prove(session, first, alone)

    def _together(self, session: Session, judge: Judge, base: Resident) -> tuple[Trial | None, Resident]:
        """(all switches, or all that run alone where all do not run, or None; the baseline)."""
        trial, row, base = self._combined(session, judge, base, "all", ALL, self.switches)
        if row["status"] in RAN or row["status"] == "same settings":
            return (trial if row["status"] in RAN else None), base
        running = [other["name"] for other in session.record.rows
                   if other["kind"] == "alone" and other["status"] in (*RAN, "same settings")]
        if len(running) in (0, 1, len(self.switches)):
            return None, base
        trial, row, base = self._combined(session, judge, base, "all", f"{ALL} that run", running)
        return (trial if row["status"] in RAN else None), base

    def _left_out(self, session: Session, judge: Judge, together: Trial) -> None:
        """All of them are the side that stays: what leaving one out loses is measured against them directly."""
        from forge.bench.resident import ArmFailed

        idle = [row["name"] for row in session.record.rows if row["status"] == "same settings"]
        there = [switch for switch in self.switches if set(words_of(switch)) <= set(together.words)]
        try:
            base = session.open(together, self.timing)
        except ArmFailed as failure:        # it ran a moment ago
            session.record.facts["reason"] = f"{together.name} does not run again: {failure}"
            return
        for switch in there:
            if switch not in idle:
                others = [other for other in there if other != switch]
                base = self._combined(session, judge, base, "left out", f"without {switch}", others)[2]

    def _combined(self, session: Session, judge: Judge, base: Resident, kind: str, name: str,
                  switches: list[str]) -> tuple[Trial | None, dict[str, Any], Resident]:
        """(the trial of several switches, its row, the side it was held against). Switches that cannot be composed
        together, though each can alone, are a row."""
        from forge.bench.compare import compare

        try:
            trial = session.composer.trial(name, *switches)
        except ConfigError as error:
            row = {"name": name, "kind": kind, "against": base.name, "status": "failed", "verdict": None,
                   "words": [word for switch in switches for word in words_of(switch)], "reason": str(error),
                   "exit_code": int(error.exit_code)}
            session.add(row)
            return None, row, base
        row, base = compare(session, judge, trial, base, kind)
        lost = [switch for switch in switches if not set(words_of(switch)) <= set(trial.words)]
        if lost and row.get("reason") is None:
            row["reason"] = f"{', '.join(lost)} is set again by a later switch, which counts."
        session.add(row)
        return trial, row, base

    def _prove(self, session: Session, first: Trial, alone: list[Trial]) -> None:
        from forge.bench.proof import prove

        rows = {row["name"]: row for row in session.record.rows if row["kind"] == "alone"}
        ran = [trial for trial in alone if rows[trial.name]["status"] in RAN]
        session.progress.measure(len(ran), "switch")
        for trial in ran:
            session.progress.tell(trial.name, "verifying")
            rows[trial.name] |= prove(trial, first, self.verify_seconds)
            session.record.write()
            session.progress.done()


def overlap(rows: list[dict[str, Any]], floor: float | None) -> dict[str, Any] | None:
    """What the switches would gain together if none touched another, and what they gain; None where one is missing.

    floor: as a gain. verdict: overlap or help, where the gain of all is proven and the two differ (in logarithms) by
    more than the noise of all that they are made of, each no more certain than the floor; else not proven.
    """
    alone = [row for row in rows if row["kind"] == "alone" and row["status"] != "same settings"]
    together = [row for row in rows if row["kind"] == "all" and row["name"] == ALL and row.get("gain")]
    if not together or not all(row.get("gain") for row in alone):
        return None
    singles, (both,) = sum(row["gain"]["log_mean"] for row in alone), together
    apart, noise = both["gain"]["log_mean"] - singles, _noise([*alone, both], floor)
    proven = both["verdict"] in ("faster", "slower") and noise is not None and abs(apart) > noise
    return {"product_of_singles": math.expm1(singles), "all": both["gain"]["estimate"], "log_difference": apart,
            "log_noise": noise, "verdict": "not proven" if not proven else "help" if apart > 0 else "overlap"}


def _noise(rows: list[dict[str, Any]], floor: float | None) -> float | None:
    """Half the width of the interval of a sum of their log-ratios; None where it is not known."""
    halves = [row["gain"]["log_half_width"] for row in rows]
    if floor is None or None in halves:
        return None
    return math.hypot(*(max(half, math.log1p(floor)) for half in halves))
