"""The ends and the curves of trainings, in pairs: one pair a seed.

A pair starts from the same weights and sees the same data, so what differs in it is the change and what chaos makes of
rounding. The mean of the pairs' relative differences is known to a t interval over the seeds. It must lie within the
tolerance, interval and all; where the interval is too wide for that, nothing is concluded.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable
from itertools import combinations
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any

from forge.observe.student import t_interval
from forge.verify import BY_DESIGN, CANNOT_JUDGE, DIFFERS, SAME_BITS, SAME_METRIC, Verdict
from forge.verify.changes import kind_of
from forge.verify.job import Job, found
from forge.verify.run_side import do

if TYPE_CHECKING:
    from forge.verify.converge import Converge
    from forge.verify.pair import Pair
    from forge.verify.record import Record

TWIN = "twin"           # the baseline again, from weights that differ by one rounding
METRICS = {"heldout_loss": "held-out loss", "accuracy": "next-token accuracy"}

Trained = dict[str, list[dict[str, Any]]]       # side -> what each seed's training left


def compare_trainings(verify: Converge, pair: Pair, record: Record) -> Verdict:
    """Notes the pairs so far after each seed, so that an interrupted comparison keeps them."""
    arms = {"baseline": pair.baseline, "candidate": pair.candidate} | ({TWIN: pair.baseline} if verify.twin else {})
    trained: Trained = {name: [] for name in arms}
    for number in range(verify.seeds):
        for name, side in arms.items():
            print(f"forge: seed {number + 1} of {verify.seeds}, {name}", file=sys.stderr)
            job = Job(f"{name}_{number}", "training", seed=pair.baseline.config.seed + number, steps=verify.steps,
                      batches=verify.batches, weights=str(record.run_dir / f"scratch/weights_{number}.safetensors"),
                      nudge=name == TWIN)
            trained[name].append(found(do(side, [job], pair.allowed), job.name))
            if "foreign" in trained[name][-1]:
                return _foreign(verify, pair, trained[name][-1]["foreign"])
        record.note("training", facts(trained, verify.smooth))
    return judge(verify, pair, facts(trained, verify.smooth))


def facts(trained: Trained, smooth: int) -> dict[str, Any]:
    """For result.json: each metric's values, the mean of the pairs' relative differences with its interval, the same of
    the twin, and the baseline's spread over the seeds; the curves and their largest gaps."""
    curves = {name: [smoothed(one["losses"], smooth) for one in runs] for name, runs in trained.items()}
    own = curves["baseline"]
    gaps = {name: largest_gap(zip(own, other, strict=True)) for name, other in curves.items() if name != "baseline"}
    gaps["seeds"] = largest_gap(combinations(own, 2))
    metrics = {}
    for key in METRICS:
        values = {name: [float(one[key]) for one in runs] for name, runs in trained.items()}
        apart = {name: _pairs(values["baseline"], others) for name, others in values.items() if name != "baseline"}
        metrics[key] = {"values": values, "pairs": apart, "spread": spread(values["baseline"]),
                        "interval": {name: t_interval(pairs) for name, pairs in apart.items()}}
    return {"metrics": metrics, "curves": curves, "largest_gaps": gaps, "seeds": len(own),
            "same_bits": trained["baseline"] == trained["candidate"]}


def _pairs(baseline: list[float], other: list[float]) -> list[float]:
    """Relative differences: none between 0 and 0, and infinite from 0 to anything else."""
    return [(after - before) / before if before else math.inf if after else 0.0
            for before, after in zip(baseline, other, strict=True)]


def judge(verify: Converge, pair: Pair, measured: dict[str, Any]) -> Verdict:
    if measured["same_bits"]:
        return Verdict(SAME_BITS, f"All {verify.seeds} pairs of trainings are equal bit for bit over {verify.steps} "
                                  f"steps.")
    metrics, gaps = measured["metrics"], measured["largest_gaps"]
    told = "; ".join(_told(name, metrics[key]) for key, name in METRICS.items())
    reason = (f"After {verify.steps} steps, over {verify.seeds} seeds: {told}. The curves lie at most "
              f"{gaps['candidate']:.2g} nats apart, those of two seeds {gaps['seeds']:.2g}.")
    bounds = [one["interval"]["candidate"] for one in metrics.values()]
    if all(abs(mean) + half <= verify.tolerance for mean, half in bounds):
        return Verdict(SAME_METRIC, f"Within {verify.tolerance:.2%}. {reason}")
    if any(_beyond(one, verify.tolerance) for one in metrics.values()):
        meant = [change for change in pair.changes if kind_of(change, verify.declared, pair.declared) != "nothing"]
        verdict = f"{BY_DESIGN}: {', '.join(map(str, meant))}" if meant else DIFFERS
        return Verdict(verdict, f"More than {verify.tolerance:.2%} apart. {reason}")
    why = next(filter(None, map(_incomparable, METRICS.values(), metrics.values())), None)
    if why is None:
        why = (f"The pairs differ too much to say whether it is within {verify.tolerance:.2%}: take more seeds "
               f"(verify.seeds={verify.seeds * 2}) or a lower rate.")
    return Verdict(CANNOT_JUDGE, f"{why} {reason}")


def _beyond(one: dict[str, Any], tolerance: float) -> bool:
    """Whether a metric differs for certain: by its whole interval, or as a candidate that ends in no number."""
    mean, half = one["interval"]["candidate"]
    finite = {side: all(map(math.isfinite, one["values"][side])) for side in ("baseline", "candidate")}
    return abs(mean) - half > tolerance or (finite["baseline"] and not finite["candidate"])


def _incomparable(name: str, one: dict[str, Any]) -> str | None:
    """Why the baseline's values of a metric give no relative difference, or None where they do."""
    for seed, (before, pair) in enumerate(zip(one["values"]["baseline"], one["pairs"]["candidate"], strict=True), 1):
        if not math.isfinite(before):
            return f"The baseline's {name} is {before} for seed {seed}: there is nothing to compare with."
        if before == 0 and pair:
            return (f"The baseline's {name} is 0 for seed {seed}, and nothing is relative to that: train longer "
                    f"(verify.steps), or judge on more text (verify.batches).")
    return None


def smoothed(losses: list[float], smooth: int) -> list[float]:
    return [fmean(losses[first:first + smooth]) for first in range(0, len(losses), smooth)]


def spread(values: list[float]) -> float:
    """The standard deviation, relative to the mean; not a number where there is none."""
    known = len(values) > 1 and fmean(values) and all(map(math.isfinite, values))
    return stdev(values) / abs(fmean(values)) if known else math.nan


def largest_gap(pairs: Iterable[tuple[list[float], list[float]]]) -> float:
    """The largest difference at any point of any two curves."""
    return max((abs(before - after) for one, other in pairs for before, after in zip(one, other, strict=True)),
               default=math.nan)


def _told(name: str, one: dict[str, Any]) -> str:
    baseline, candidate = (fmean(one["values"][side]) for side in ("baseline", "candidate"))
    mean, half = one["interval"]["candidate"]
    apart = f"{mean:+.3%} +- {half:.3%}" if math.isfinite(mean) else "no relative difference"
    noise = []
    if TWIN in one["pairs"] and all(map(math.isfinite, one["pairs"][TWIN])):
        noise.append(f"one rounding of the weights alone makes up to {max(map(abs, one['pairs'][TWIN])):.3%}")
    if math.isfinite(one["spread"]):
        noise.append(f"the seeds alone spread {one['spread']:.3%}")
    return f"{name} {candidate:.4f} against {baseline:.4f}, {apart}" + (f" ({', '.join(noise)})" if noise else "")


def _foreign(verify: Converge, pair: Pair, foreign: list[str]) -> Verdict:
    meant = [change for change in pair.changes if kind_of(change, verify.declared, pair.declared) == "maths"]
    verdict = f"{BY_DESIGN}: {', '.join(map(str, meant))}" if meant else DIFFERS
    return Verdict(verdict, f"Their parameters are not the same: {foreign[0]}.")
