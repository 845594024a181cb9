"""Muon (Jordan et al. 2024): a matrix moves by its momentum with all singular values made about equal. Embeddings,
head, router gates and vectors go to AdamW, as its authors say."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from forge.optimizer import Group
from forge.optimizer.limits import fraction, positive, shared_problems

if TYPE_CHECKING:
    from torch import nn

    from forge.config import Config
    from forge.optimizer.update import GradientUpdate
    from forge.precision import Precision
    from forge.schedule import Schedule


@dataclass(frozen=True)
class ByAdamW:
    """match: names of matrices, as patterns of a shell, that AdamW updates; vectors always go to it. lr: its rate."""

    match: list[str]
    lr: float
    beta1: float
    beta2: float
    eps: float


@dataclass(frozen=True)
class Muon:
    """lr: the peak rate of the matrices; the schedule scales it, and AdamW's beside it.

    nesterov: the gradient counts once more beside the momentum. iterations: of Newton and Schulz.
    adjust_lr: times lr, for a matrix [m, n]: original: sqrt(max(1, m / n)) (Jordan); match_rms_adamw:
        0.2 * sqrt(max(m, n)), which makes steps as large as AdamW's, so that its rates fit (Liu et al. 2025).
    products: the format of the iterations' products; auto: bfloat16 on a GPU, float32 on a CPU.
    clip: the largest 2-norm of the gradient; null: not clipped.
    max_skipped: updates in a row that may be skipped as not finite before the run ends.
    adamw: what AdamW updates, and how. groups: settings by parameter name; the first match decides.
    """

    lr: float
    momentum: float
    nesterov: bool
    iterations: int
    adjust_lr: Literal["original", "match_rms_adamw"]
    products: Literal["auto", "bfloat16", "float32"]
    weight_decay: float
    clip: float | None
    max_skipped: int
    adamw: ByAdamW
    groups: list[Group]

    def problems(self, config: Config) -> Iterator[str]:
        yield from shared_problems(self)
        yield from fraction("momentum", self.momentum)
        yield from positive("adamw.lr", self.adamw.lr)
        for name in ("beta1", "beta2"):
            yield from fraction(f"adamw.{name}", getattr(self.adamw, name))
        if not self.adamw.eps >= 0:
            yield f"optimizer.adamw.eps={self.adamw.eps}: 0 or more is wanted."
        if not 1 <= self.iterations < 100:
            yield f"optimizer.iterations={self.iterations}: at least 1 and less than 100 is wanted; 5 is usual."

    def build(self, model: nn.Module, schedule: Schedule, steps: int, precision: Precision) -> GradientUpdate:
        from forge.optimizer.groups import parameter_groups
        from forge.optimizer.masters import over_masters
        from forge.optimizer.orthogonal import Orthogonal, shared_out
        from forge.optimizer.update import GradientUpdate

        groups = parameter_groups(model, self.groups, self.weight_decay)
        own, rest = shared_out(groups, self.adamw, self.lr)
        optimizer = over_masters(precision.master, own + rest, lambda groups: Orthogonal(
            groups[:len(own)], groups[len(own):], self))
        return GradientUpdate(optimizer, self.lr, self.clip, schedule, steps, precision)
