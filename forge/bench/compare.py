"""Rows of the table: what a side did against another one, and what that proves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from forge.bench import Timing
from forge.bench.resident import ArmFailed
from forge.bench.session import Resident, Session
from forge.bench.statistics import Estimate, gain, smallest_provable
from forge.bench.trial import Trial
from forge.bench.turns import Block, Turn, undisturbed

Row = dict[str, Any]


@dataclass
class Judge:
    """floor: the log-ratio that two equal arms reached, or None where it is not known; then nothing is proven.

    ceiling: FLOP/s of products as bench=micro measured them, or None.
    """

    timing: Timing
    max_floor: float
    ceiling: float | None
    floor: float | None = None

    @property
    def quiet_enough(self) -> bool:
        return self.floor is not None and gain(self.floor) <= self.max_floor

    def verdict(self, estimate: Estimate) -> str:
        assert self.floor is not None or not self.quiet_enough
        return estimate.verdict(self.floor or 0.0) if self.quiet_enough else "not proven"


def find_floor(session: Session, judge: Judge, baseline: Resident, again: Trial) -> None:
    """Measure the baseline against a second baseline, and note what it did itself. Raises ForgeError."""
    facts = session.record.facts
    row: Row = {"name": again.name, "kind": "a/a", "against": baseline.name, "words": again.words}
    try:
        with session.resident(again, judge.timing) as second:
            blocks = session.blocks([baseline, second], judge.timing)
    except ArmFailed as failure:
        facts |= {"floor": None, "abstained": True,
                  "reason": f"The noise floor is not known, for the second baseline does not run beside the first: "
                            f"{failure}"}
        session.add({**row, "status": failure.status, "reason": str(failure)})
        return
    session.record.rows.append({**figures(baseline, blocks, judge.ceiling), "name": baseline.name, "kind": "baseline",
                                "against": None, "words": baseline.arm.trial.words, "verdict": None})
    row |= figures(second, blocks, judge.ceiling)
    good = undisturbed(blocks)
    if len(good) >= 2:
        estimate = Estimate.of([block.log_ratio(second.name, baseline.name) for block in good])
        judge.floor = estimate.reach
        row |= {"gain": shown(estimate), "verdict": estimate.verdict(0.0)}
        facts["floor"] = gain(judge.floor) if judge.floor is not None else None
    if not judge.quiet_enough:
        facts |= {"abstained": True, "reason": _too_noisy(judge, blocks)}
    session.add(row)


def _too_noisy(judge: Judge, blocks: list[Block]) -> str:
    if judge.floor is None:
        seen = sorted({why for block in blocks for why in block.disturbances})
        return f"The noise floor is not known: of {len(blocks)} blocks, too few were undisturbed ({', '.join(seen)})."
    return (f"Two equal baselines differ by up to {gain(judge.floor):.1%} here, more than bench.max_floor="
            f"{judge.max_floor:g}: this machine is too noisy to judge. Let nothing else run on it, take more "
            f"(bench.timing.blocks) or longer turns (bench.timing.seconds), or raise bench.max_floor.")


def compare(session: Session, judge: Judge, trial: Trial, base: Resident, kind: str) -> tuple[Row, Resident]:
    """(the row of a trial against an arm that runs, that arm). An arm that fails is a row; `base` is started again
    where the trial took it along. Raises BaselineFailed."""
    row: Row = {"name": trial.name, "kind": kind, "against": base.name, "words": trial.words, "verdict": None}
    if trial.same_as(base.arm.trial):
        return {**row, "status": "same settings", "reason": f"changes nothing: {base.name} has these settings."}, base
    try:
        with session.resident(trial, judge.timing) as side:
            blocks = session.blocks([base, side], judge.timing)
        return row | outcome(side, base, blocks, judge), base
    except ArmFailed as failure:
        row |= failed(failure, trial.name, base)
        if failure.arm == base.name:
            base = restart(session, judge, base)
    return row, base


def restart(session: Session, judge: Judge, side: Resident) -> Resident:
    """Raises BaselineFailed."""
    side.arm.end()
    return session.baseline(side.arm.trial, judge.timing)


def failed(failure: ArmFailed, name: str, *beside: Resident) -> Row:
    whose = "" if failure.arm == name else f"{failure.arm} failed beside it: "
    held = [f"{side.name} {side.peak_memory / 1e9:.2f} GB" for side in beside if side.peak_memory]
    where = f" It ran beside {', '.join(held)}." if failure.status == "out of memory" and held else ""
    return {"status": failure.status, "reason": f"{whose}{failure}{where}", "exit_code": int(failure.exit_code)}


def outcome(side: Resident, base: Resident, blocks: list[Block], judge: Judge) -> Row:
    """What a side did, its gain over another, and the verdict."""
    row = figures(side, blocks, judge.ceiling)
    good = undisturbed(blocks)
    if len(good) < 2:
        return row | {"status": "disturbed", "reason": _disturbed(blocks), "verdict": "not proven"}
    estimate = Estimate.of([block.log_ratio(side.name, base.name) for block in good])
    notes = []
    if side.tokens_per_step != base.tokens_per_step:
        notes.append(f"an update has {side.tokens_per_step:,.0f} tokens, that of {base.name} "
                     f"{base.tokens_per_step:,.0f}: compared by tokens a second.")
    return row | {"gain": shown(estimate), "verdict": judge.verdict(estimate), "reason": " ".join(notes) or None}


def _disturbed(blocks: list[Block]) -> str:
    return "too few undisturbed blocks: " + ", ".join(sorted({why for block in blocks for why in block.disturbances}))


def figures(side: Resident, blocks: Sequence[Block], ceiling: float | None) -> Row:
    """What a side did, over its turns in undisturbed blocks, or in all where none is."""
    turns: list[Turn] = [turn for block in (undisturbed(blocks) or blocks)
                         for name, turn in zip(block.order, block.turns, strict=True) if name == side.name]
    lengths = [ms for turn in turns for ms in turn.lengths]
    rate = sum(turn.tokens for turn in turns) / sum(lengths) * 1e3
    phases = {name: sum(turn.phases.get(name, 0.0) for turn in turns) / len(lengths)
              for name in sorted({name for turn in turns for name in turn.phases})}
    side.peak_memory = max((turn.peak_memory for turn in turns if turn.peak_memory), default=None)
    device, cost = side.facts["device"], side.facts["flops_per_token"] * rate
    peak, count = device["peak_flops"], device["count"]
    return {"status": "measured", "reason": None, "step_ms": median(lengths), "tokens_per_second": rate,
            "tokens_per_step": side.tokens_per_step, "phases_ms": phases, "peak_memory_bytes": side.peak_memory,
            "mfu": cost / (peak * count) if peak else None,
            "mfu_measured": cost / (ceiling * count) if ceiling else None,
            "startup_seconds": side.facts["startup_seconds"], "warmup_steps_dropped": side.dropped,
            "blocks": len(undisturbed(blocks)), "disturbed_blocks": len(blocks) - len(undisturbed(blocks))}


def shown(estimate: Estimate) -> Row:
    """Gains, 0.1 for a tenth more tokens a second, and the logarithm they come from."""
    return {"estimate": gain(estimate.mean), "low": None if estimate.low is None else gain(estimate.low),
            "high": None if estimate.high is None else gain(estimate.high), "log_mean": estimate.mean,
            "log_half_width": estimate.half_width, "blocks": estimate.num}


def note_smallest(session: Session, judge: Judge) -> None:
    """The smallest gain that this bench could have proven."""
    halves = [Estimate(0.0, -half, half, 2) for row in session.record.rows
              if row.get("gain") and (half := row["gain"]["log_half_width"]) is not None]
    smallest = smallest_provable(judge.floor, halves)
    session.record.facts["smallest_provable_gain"] = None if smallest is None else gain(smallest)
