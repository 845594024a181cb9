"""AdamW (Loshchilov & Hutter 2019): parameter by parameter, by lists, in a few kernels, or in one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from forge.optimizer import Group

if TYPE_CHECKING:
    from torch import nn

    from forge.config import Config
    from forge.optimizer.update import GradientUpdate
    from forge.precision import Precision
    from forge.schedule import Schedule


@dataclass(frozen=True)
class AdamW:
    """lr: the peak rate; the schedule scales it. clip: the largest 2-norm of the gradient; null: not clipped.

    implementation: loop is the plain twin; foreach launches one kernel for many parameters; fused does the whole
        update in one, unscales and clips inside it, and needs no host read to skip an update that is not finite;
        triton does so in one launch for all parameters, and casts between masters and weights on its way.
    max_skipped: updates in a row that may be skipped as not finite before the run ends.
    groups: settings by parameter name; the first match decides.
    """

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    clip: float | None
    implementation: Literal["loop", "foreach", "fused", "triton"]
    max_skipped: int
    groups: list[Group]

    def problems(self, config: Config) -> Iterator[str]:
        if not 0 < self.lr < float("inf"):
            yield f"optimizer.lr={self.lr}: more than 0 is wanted."
        if not self.weight_decay >= 0:
            yield f"optimizer.weight_decay={self.weight_decay}: 0 or more is wanted."
        if not self.eps >= 0:
            yield f"optimizer.eps={self.eps}: 0 or more is wanted."
        if self.max_skipped < 0:
            yield f"optimizer.max_skipped={self.max_skipped}: 0 or more is wanted."
        for index, group in enumerate(self.groups):
            if not group.lr_scale >= 0:
                yield f"optimizer.groups[{index}].lr_scale={group.lr_scale}: 0 or more is wanted."
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                yield f"optimizer.{name}={getattr(self, name)}: at least 0 and less than 1 is wanted."
        if self.clip is not None and not self.clip > 0:
            yield f"optimizer.clip={self.clip}: more than 0 is wanted, or null for no clipping."

    def build(self, model: nn.Module, schedule: Schedule, steps: int, precision: Precision) -> GradientUpdate:
        import torch

        from forge.kernels import runs_on
        from forge.optimizer.groups import parameter_groups
        from forge.optimizer.masters import over_masters
        from forge.optimizer.one_launch import OneLaunchAdamW
        from forge.optimizer.update import GradientUpdate

        groups = parameter_groups(model, self.groups, self.weight_decay)
        betas, implementation = (self.beta1, self.beta2), self.implementation
        device = groups[0]["params"][0].device
        if implementation == "triton" and not runs_on(device, "optimizer.implementation=triton", "fused"):
            implementation = "fused"
        if implementation == "triton":
            optimizer: torch.optim.Optimizer = OneLaunchAdamW(groups, self.lr, betas, self.eps, precision.master)
        else:
            optimizer = over_masters(precision.master, groups, lambda groups: torch.optim.AdamW(
                groups, lr=self.lr, betas=betas, eps=self.eps,
                foreach=implementation == "foreach", fused=implementation == "fused"))
        return GradientUpdate(optimizer, self.lr, self.clip, schedule, steps, precision)
