"""LARS (You, Gitman and Ginsburg 2017): each layer has a rate of its own, in proportion to its weights."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from forge.optimizer import Group
from forge.optimizer.limits import fraction, positive, shared_problems

if TYPE_CHECKING:
    from torch import nn

    from forge.config import Config
    from forge.optimizer.update import GradientUpdate
    from forge.precision import Precision
    from forge.schedule import Schedule


@dataclass(frozen=True)
class LARS:
    """lr: the peak rate; the schedule scales it. clip: the largest 2-norm of the gradient; null: not clipped.

    trust: a step without momentum moves a matrix by about lr * trust of its norm.
    weight_decay: beta of the paper, added to the gradient before the layer's rate is taken.
    max_skipped: updates in a row that may be skipped as not finite before the run ends.
    groups: settings by parameter name; the first match decides.
    """

    lr: float
    trust: float
    momentum: float
    weight_decay: float
    clip: float | None
    max_skipped: int
    groups: list[Group]

    def problems(self, config: Config) -> Iterator[str]:
        yield from shared_problems(self)
        yield from fraction("momentum", self.momentum)
        yield from positive("trust", self.trust)

    def build(self, model: nn.Module, schedule: Schedule, steps: int, precision: Precision) -> GradientUpdate:
        from forge.optimizer.groups import parameter_groups
        from forge.optimizer.layerwise import Layerwise
        from forge.optimizer.masters import over_masters
        from forge.optimizer.update import GradientUpdate

        groups = parameter_groups(model, self.groups, self.weight_decay)
        optimizer = over_masters(precision.master, groups, lambda groups: Layerwise(
            groups, lr=self.lr, trust=self.trust, momentum=self.momentum))
        return GradientUpdate(optimizer, self.lr, self.clip, schedule, steps, precision)
