"""Do two optimizers make the same of the same gradients?

Gradients are given, so that nothing but the optimizer and its schedule can differ; and weights are held in float64,
where their own rounding does not hide an update that is a thousand times smaller. What remains is float32 by contract:
norms, scales and rates. So both must agree to a few roundings of float32. Whether bits are equal is asked in the run's
own number format.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import safe_open

from forge.verify.job import Job, found
from forge.verify.rule import EPS, Compared, Distance
from forge.verify.run_side import do

if TYPE_CHECKING:
    from forge.verify.gradients import Gradients
    from forge.verify.pair import Pair

Ask = Callable[..., Job]


def compare_updates(verify: Gradients, pair: Pair, ask: Ask, gradients: Path, watch: list[str]) -> Compared:
    """gradients: the folder of a pass of the baseline, whose first update's gradients both are fed. watch: see Job."""
    fed = {"what": "update", "gradients": str(gradients / "update_1.safetensors"), "factors": verify.factors}
    folders = [do(side, [ask(side.name, "update_64", precision="float64", watch=watch,
                             **fed),
                         ask(side.name, "update_own", precision="own", **fed)], pair.allowed) for side in pair.sides]
    allowed = verify.update_roundings * EPS["float32"]
    tensors, norm = _distances([[folder / job / "update_1.safetensors" for folder in folders]
                                for job in ("update_64", "update_own")], allowed)
    rates = [found(folder, "update_64")["rates"] for folder in folders]
    apart = _apart(*rates)
    tensors.append(Distance("the schedule", 1, len(rates[0]), 0.0, apart, apart, EPS["float32"], rates[0] == rates[1]))
    return Compared("update", ("float64", "float64"), [], [], [norm], tensors, [])


def compare_stored(verify: Gradients, pair: Pair, ask: Ask, gradients: Path) -> Compared:
    """The same gradients, each side in the format of its own weights, or of its masters where it has them."""
    fed = {"what": "update", "gradients": str(gradients / "update_1.safetensors"), "factors": verify.factors}
    folders = [do(side, [ask(side.name, "stored", precision="own", **fed)], pair.allowed) for side in pair.sides]
    file = "stored_1.safetensors"
    tensors, norm = _distances([[folder / "stored" / file for folder in folders]] * 2,
                               verify.update_roundings * EPS["float32"])
    formats = [side.config.precision.master or side.config.precision.parameter for side in pair.sides]
    return Compared("stored", (formats[0], formats[1]), [], [], [norm], tensors, [])


def _distances(files: list[list[Path]], allowed: float) -> tuple[list[Distance], Distance]:
    """Of each weight's change, relative to the baseline's; and of all together."""
    tensors, sizes, gaps = [], 0.0, 0.0
    wide, own = files
    with (safe_open(wide[0], "pt") as one, safe_open(wide[1], "pt") as other, safe_open(own[0], "pt") as mine,
          safe_open(own[1], "pt") as theirs):
        for name in one.keys():     # noqa: SIM118
            before, after = one.get_tensor(name), other.get_tensor(name)
            size, gap = float(before.square().sum()), float((after - before).square().sum())
            sizes, gaps = sizes + size, gaps + gap
            error = math.sqrt(gap / size) if size else math.inf if gap else 0.0
            bits = gap == 0.0 and bool(mine.get_tensor(name).equal(theirs.get_tensor(name)))
            tensors.append(Distance(name, 1, before.numel(), 0.0, error, error, allowed, bits))
    error = math.sqrt(gaps / sizes) if sizes else 0.0
    return tensors, Distance("all updates", 1, sum(one.elements for one in tensors), 0.0, error, error, allowed,
                             all(one.bits for one in tensors))


def _apart(one: list[float], other: list[float]) -> float:
    """The largest difference of two schedules, in fractions of the peak rate; 1 where they are not as long."""
    if len(one) != len(other):
        return 1.0
    return max(abs(first - second) for first, second in zip(one, other, strict=True))
