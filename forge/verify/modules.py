"""Which module is the first to give something else than it should."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from forge.verify.job import Job, found
from forge.verify.rule import Rule
from forge.verify.run_side import do

if TYPE_CHECKING:
    from forge.verify.gradients import Gradients
    from forge.verify.pair import Pair


def first_module(verify: Gradients, pair: Pair, ask: Callable[..., Job], plain: dict[str, str],
                 precision: str) -> str | None:
    """The first one, in the order in which modules finish, whose output is too far from float64; None where every
    module's is right (the fault lies in backward, or between passes), or the sides call them with other batches.

    Modules are asked without compilation, in which they no longer are calls of their own.
    """
    if ask("baseline", "").micro_batch != ask("candidate", "").micro_batch \
            or any(side.config.hardware.processes > 1 for side in pair.sides):
        return None
    uncompiled = {"compile": "none"}
    baseline = do(pair.baseline, [ask("baseline", "trace_64", precision="float64", plain=plain, trace=True),
                                  ask("baseline", "trace", precision=precision, plain=uncompiled, trace=True)],
                  pair.allowed)
    candidate = do(pair.candidate, [ask("candidate", "trace", precision=precision, plain=uncompiled, trace=True)],
                   pair.allowed)
    truth, own = found(baseline, "trace_64"), found(baseline, "trace")
    theirs = found(candidate, "trace")
    rule = Rule.of(own["compute"], own["updates"][0]["targets"], (verify.multiplier, verify.multiplier_half),
                   verify.few)
    for name, wanted in truth["modules"].items():
        before, after = own["modules"].get(name), theirs["modules"].get(name)
        if before is None or after is None or not len(wanted) == len(before) == len(after):
            continue
        error = _error(after, wanted)
        if not error <= rule.allowed(_error(before, wanted), len(wanted)):
            return str(name)
    return None


def _error(numbers: list[float], wanted: list[float]) -> float:
    size = math.sqrt(sum(one * one for one in wanted))
    gap = math.sqrt(sum((one - other) ** 2 for one, other in zip(numbers, wanted, strict=True)))
    return gap / size if size else gap
