"""The ends and the curves of trainings, in pairs: one pair a seed.

A pair starts from the same weights and sees the same data, so what differs in it is the change and what chaos makes of
rounding. The mean of the pairs' relative differences is known to a t interval over the seeds. It must lie within the
tolerance, interval and all; where the interval is too wide for that, nothing is concluded.
"""

from __future__ import annotations

import math
import sys
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any

from forge.verify import BY_DESIGN, CANNOT_JUDGE, DIFFERS, SAME_BITS, SAME_METRIC, Verdict
from forge.verify.changes import kind_of
from forge.verify.job import Job, found
from forge.verify.run_side import do

if TYPE_CHECKING:
    from forge.verify.converge import Converge
    from forge.verify.pair import Pair
    from forge.verify.record import Record

METRICS = {"heldout_loss": "held-out loss", "accuracy": "next-token accuracy"}
# Student's t, two-sided 95 %, by degrees of freedom; beyond, the value of the last is a little too careful.
T95 = [12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228]

Trained = dict[str, list[dict[str, Any]]]       # side -> what each seed's training left


def compare_trainings(verify: Converge, pair: Pair, record: Record) -> Verdict:
    """Notes the pairs so far after each seed, so that an interrupted comparison keeps them."""
    trained: Trained = {side.name: [] for side in pair.sides}
    for number in range(verify.seeds):
        for side in pair.sides:
            print(f"forge: seed {number + 1} of {verify.seeds}, {side.name}", file=sys.stderr)
            job = Job(f"seed_{number}", "training", seed=pair.baseline.config.seed + number, steps=verify.steps,
                      batches=verify.batches, weights=str(record.run_dir / f"scratch/weights_{number}.safetensors"))
            trained[side.name].append(found(do(side, [job], pair.allowed), job.name))
            if "foreign" in trained[side.name][-1]:
                return _foreign(verify, pair, trained[side.name][-1]["foreign"])
        record.note("training", facts(trained, verify.smooth))
    return judge(verify, pair, facts(trained, verify.smooth))


def facts(trained: Trained, smooth: int) -> dict[str, Any]:
    """For result.json: each metric's values, the mean of the pairs' relative differences with its interval, and the
    baseline's spread over the seeds; the curves and their largest gap."""
    sides = list(trained)
    pairs = list(zip(*trained.values(), strict=True))
    curves = {name: [smoothed(one["losses"], smooth) for one in runs] for name, runs in trained.items()}
    gap = max(abs(before - after) for one, other in zip(*curves.values(), strict=True)
              for before, after in zip(one, other, strict=True))
    metrics = {}
    for key in METRICS:
        values = {side: [one[key] for one in runs] for side, runs in trained.items()}
        apart = [(after[key] - before[key]) / before[key] if before[key] else math.inf for before, after in pairs]
        mean, half = interval(apart)
        spread = stdev(values[sides[0]]) / abs(fmean(values[sides[0]])) if len(pairs) > 1 else None
        metrics[key] = {**values, "relative_differences": apart, "mean": mean, "half_width": half, "spread": spread}
    return {"metrics": metrics, "curves": curves, "largest_gap": gap, "seeds": len(pairs), "same_bits": all(
        before == after for before, after in pairs), "gap_between_seeds": _between_seeds(curves[sides[0]])}


def judge(verify: Converge, pair: Pair, measured: dict[str, Any]) -> Verdict:
    if measured["same_bits"]:
        return Verdict(SAME_BITS, f"All {verify.seeds} pairs of trainings are equal bit for bit over {verify.steps} "
                                  f"steps.")
    told = "; ".join(_told(name, measured["metrics"][key]) for key, name in METRICS.items())
    reason = (f"After {verify.steps} steps, over {verify.seeds} seeds: {told}. The curves lie at most "
              f"{measured['largest_gap']:.2g} nats apart, those of two seeds {measured['gap_between_seeds']:.2g}.")
    bounds = [(abs(one["mean"]), one["half_width"]) for one in measured["metrics"].values()]
    if all(mean + half <= verify.tolerance for mean, half in bounds):
        return Verdict(SAME_METRIC, f"Within {verify.tolerance:.2%}. {reason}")
    if any(mean - half > verify.tolerance for mean, half in bounds):
        meant = [change for change in pair.changes if kind_of(change, verify.declared, pair.declared) != "nothing"]
        verdict = f"{BY_DESIGN}: {', '.join(map(str, meant))}" if meant else DIFFERS
        return Verdict(verdict, f"More than {verify.tolerance:.2%} apart. {reason}")
    return Verdict(CANNOT_JUDGE, f"Seeds differ too much to say whether it is within {verify.tolerance:.2%}: take more "
                                 f"(verify.seeds={verify.seeds * 2}) or more steps. {reason}")


def interval(values: list[float]) -> tuple[float, float]:
    """(mean, half the width of its 95 % t interval)"""
    if len(values) < 2:
        return fmean(values), math.inf
    quantile = T95[min(len(values) - 1, len(T95)) - 1]
    return fmean(values), quantile * stdev(values) / math.sqrt(len(values))


def smoothed(losses: list[float], smooth: int) -> list[float]:
    return [fmean(losses[first:first + smooth]) for first in range(0, len(losses), smooth)]


def _between_seeds(curves: list[list[float]]) -> float:
    return max((abs(one - other) for first, curve in enumerate(curves) for second in curves[first + 1:]
                for one, other in zip(curve, second, strict=True)), default=math.nan)


def _told(name: str, one: dict[str, Any]) -> str:
    baseline, candidate = (fmean(values) for values in list(one.values())[:2])
    return (f"{name} {candidate:.4f} against {baseline:.4f}, {one['mean']:+.3%} +- {one['half_width']:.3%} (the seeds "
            f"alone spread {one['spread']:.3%})")


def _foreign(verify: Converge, pair: Pair, foreign: list[str]) -> Verdict:
    meant = [change for change in pair.changes if kind_of(change, verify.declared, pair.declared) == "maths"]
    verdict = f"{BY_DESIGN}: {', '.join(map(str, meant))}" if meant else DIFFERS
    return Verdict(verdict, f"Their parameters are not the same: {foreign[0]}.")
