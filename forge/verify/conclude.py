"""What follows from the figures: the verdict, and its reason in a sentence."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

from forge.verify import BY_DESIGN, CANNOT_JUDGE, DIFFERS, SAME_BITS, SAME_MATHS, SAME_ROUNDING, Verdict
from forge.verify.changes import Change, Kind
from forge.verify.rule import EPS, Compared, Distance

# pass -> the kinds of changes that explain a difference in it
MEANT: dict[str, tuple[Kind, ...]] = {"maths": ("maths",), "deployed": ("maths",), "precision": ("maths", "rounding"),
                                      "update": ("maths", "rounding", "update"),
                                      "stored": ("maths", "rounding")}
FEW_MOVES = 8           # of experts, in an update: of some thousand choices, few are so near to a tie
OWN_KIND: dict[str, Kind] = {"maths": "maths", "deployed": "maths", "precision": "rounding", "update": "update",
                             "stored": "rounding"}
CALLED = {"maths": "in float32", "deployed": "as deployed", "precision": "each in its own number format",
          "update": "in the update of the weights",
          "stored": "in the update of the weights, each in the format that it is stored in"}
UPDATES = ("update", "stored")


@dataclass(frozen=True)
class Findings:
    """passes: maths and deployed, and where it applies precision and update. foreign: how the weights of the two
    models differ. kinds: each change with what it is declared to change. limit: of the baseline's error, in eps.
    inseparable: why a difference of options cannot be told from one of number formats, or None.
    updates: that optimizers made of the gradients they were fed."""

    passes: dict[str, Compared]
    foreign: list[str]
    kinds: list[tuple[Change, Kind]]
    limit: float
    inseparable: str | None = None
    updates: int = 0

    def meant(self, kinds: Collection[str]) -> list[Change]:
        return [change for change, kind in self.kinds if kind in kinds]


def conclude(findings: Findings) -> Verdict:
    """In this order: can the two be compared, are they equal, can the baseline be relied on, what differs."""
    if findings.foreign:
        return _foreign(findings)
    if all(one.bits for one in findings.passes.values()):
        return _equal(findings)
    trouble = _unreliable(findings)
    if trouble:
        return Verdict(CANNOT_JUDGE, trouble)
    wrong = [(name, one) for name, one in findings.passes.items() if not one.fine or _more_exact(name, one)]
    if not wrong:
        return _same(findings)
    for name, one in wrong:             # one that nothing explains counts before all that are explained
        if not findings.meant(MEANT[name]):
            return _different(name, one)
    return _by_design(findings, wrong)


def _foreign(findings: Findings) -> Verdict:
    listed = f"{findings.foreign[0]}" + (f", and {len(findings.foreign) - 1} more" if len(findings.foreign) > 1 else "")
    meant = findings.meant(("maths",))
    if meant:
        return Verdict(f"{BY_DESIGN}: {_named(meant)}", f"They are different models: {listed}. To compare options of "
                       f"this one, give the baseline the same model: baseline='...'.")
    return Verdict(DIFFERS, f"Their parameters are not the same: {listed}.")


def _equal(findings: Findings) -> Verdict:
    start = findings.meant(("start",))
    count = sum(1 for one in findings.passes.values() for _ in one.tensors)
    figures = f"All {count} tensors and losses of the passes ({', '.join(findings.passes)}) are equal bit for bit."
    if start:
        return Verdict(f"{BY_DESIGN}: {_named(start)}", "It decides the weights that a run begins with, and here both "
                       f"began with the baseline's. {figures}")
    silent = findings.meant(("maths", "rounding", "update"))
    more = f" {_named(silent)} may change the numbers, and did not here." if silent else ""
    return Verdict(SAME_BITS, figures + more)


def _unreliable(findings: Findings) -> str | None:
    """Why the baseline proves nothing, or None."""
    for name, one in findings.passes.items():
        if name in UPDATES:
            continue
        error, limit = one.baseline_error, findings.limit * EPS[one.compute[0]]
        if not math.isfinite(error):
            return f"The baseline's own gradients are not finite {CALLED[name]}: there is nothing to compare with."
        noisy = one.noise is not None and one.noise > error / 2
        if error > limit:
            why = (f"it does not repeat itself: two runs of it lie {one.noise:.2g} apart" if noisy else
                   "an option of it computes something else in float64, or few digits are left of its gradients")
            return (f"The baseline is {error:.2g} away from its own float64 twin {CALLED[name]}, and {limit:.2g} is "
                    f"the most that proves anything: {why}.")
    deployed = findings.passes.get("deployed")
    if deployed and not deployed.fine and deployed.noise and deployed.noise >= deployed.effect / 2:
        return (f"Two runs of the baseline lie {deployed.noise:.2g} apart, and the candidate {deployed.effect:.2g} "
                f"from it: set reproducible=true on both sides.")
    return _near_ties(findings.passes) or findings.inseparable


def _near_ties(passes: dict[str, Compared]) -> str | None:
    """Whether all that is wrong in float32 may be tokens whose experts tie within rounding, which no rounding decides
    alike: a few choices have moved in each update that is wrong, none in those that are right, and there are such."""
    maths = passes.get("maths")
    if maths is None or maths.fine:
        return None
    wrong = {one.update for one in maths.every if not one.fine}
    moved = {place + 1: max(update["moved"]) for place, update in enumerate(maths.values)}
    if any(not 0 < moved[number] <= FEW_MOVES for number in wrong) or wrong == moved.keys():
        return None
    return (f"In update {min(wrong)}, {moved[min(wrong)]:.0f} choices of an expert fell otherwise than in float64, and "
            f"everything else agrees: a tie within rounding. Compare on other rows: another seed= on both sides.")


def _more_exact(name: str, one: Compared) -> bool:
    """A number format with longer numbers: no error, and a difference by design all the same."""
    return name == "precision" and one.candidate_error * 3 < one.baseline_error


def _same(findings: Findings) -> Verdict:
    deployed = findings.passes["deployed"]
    if "maths" not in findings.passes:
        return Verdict(SAME_ROUNDING, f"There is no float32 path to compare in. As deployed, {_figures(deployed)}")
    return Verdict(SAME_MATHS, f"In float32, {_figures(findings.passes['maths'])} As deployed, {_figures(deployed)}")


def _different(name: str, one: Compared) -> Verdict:
    first = one.first
    assert first is not None
    noise = f" Two runs of the baseline lie {one.noise:.2g} apart." if one.noise else ""
    return Verdict(DIFFERS, f"{CALLED[name].capitalize()}, {_told(first, name)} The gradients change by "
                            f"{one.effect:.2g} of their size.{noise}")


def _by_design(findings: Findings, wrong: list[tuple[str, Compared]]) -> Verdict:
    """The verdict names the changes that were meant to do it; the reason has the figures of the first pass."""
    chosen = [change for name, _ in wrong for change in findings.meant((OWN_KIND[name],))
              or findings.meant(MEANT[name])]
    name, one = wrong[0]
    factor = "infinitely many" if one.ratio is None else f"{one.ratio:.3g}"
    what = (f"The error against float64 is {one.candidate_error:.2g}, {factor} times the baseline's."
            if name == "precision" else f"{CALLED[name].capitalize()}, {_told(one.first, name)}" if one.first else "")
    reason = f"{what} The {_counted(findings, name)} differ by {one.effect:.2g} of their size."
    hidden = findings.meant(("nothing",))
    if hidden and name == "maths":
        reason += f" What {_named(hidden)} may have done is hidden behind it: compare that alone."
    return Verdict(f"{BY_DESIGN}: {_named(_once(chosen))}", reason)


def _counted(findings: Findings, name: str) -> str:
    return f"changes of the weights, in {findings.updates} updates," if name in UPDATES else "gradients"


def _told(first: Distance, name: str) -> str:
    """What is wrong with the first tensor that is."""
    update = f" (update {first.update})" if first.update > 1 else ""
    if math.isinf(first.candidate):
        return f"one side has no gradient of {first.name}{update}."
    if not math.isfinite(first.candidate):
        return f"the candidate's {first.name}{update} is not a finite number."
    if name in UPDATES:
        return (f"{first.name} is changed otherwise: by {first.candidate:.2g} of its update, allowed "
                f"{first.allowed:.2g}.")
    times = f"{first.ratio:.3g} times as far as the baseline's, " if first.ratio is not None else ""
    return (f"{first.name}{update} is the first that is too far from float64: {first.candidate:.2g}, {times}"
            f"allowed {first.allowed:.2g}.")


def _figures(one: Compared) -> str:
    worst = one.worst
    return (f"the candidate's gradients are {one.candidate_error:.2g} away from float64 and the baseline's "
            f"{one.baseline_error:.2g}; nearest to its limit is {worst.name} ({worst.candidate:.2g}, allowed "
            f"{worst.allowed:.2g}).")


def _once(changes: list[Change]) -> list[Change]:
    return [change for place, change in enumerate(changes) if change not in changes[:place]]


def _named(changes: list[Change]) -> str:
    shown = ", ".join(str(change) for change in changes[:3])
    return shown + (f" and {len(changes) - 3} more" if len(changes) > 3 else "")
