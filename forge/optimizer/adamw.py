"""AdamW (Loshchilov & Hutter 2019): parameter by parameter, by lists, in a few kernels, or in one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from forge.optimizer import Group
from forge.optimizer.limits import fraction, shared_problems

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
        yield from shared_problems(self)
        if not self.eps >= 0:
            yield f"optimizer.eps={self.eps}: 0 or more is wanted."
        for name in ("beta1", "beta2"):
            yield from fraction(name, getattr(self, name))
        precision = config.precision
        if self.implementation == "triton" and precision.parameter != "float32" and precision.master is None:
            yield (f"optimizer.implementation=triton keeps its state in float32, and weights are in "
                   f"{precision.parameter} without masters: set precision=bf16_master, or "
                   f"optimizer.implementation=fused.")

    def build(self, model: nn.Module, schedule: Schedule, steps: int, precision: Precision) -> GradientUpdate:
        import torch

        from forge.kernels import runs_on
        from forge.optimizer.groups import parameter_groups
        from forge.optimizer.masters import over_masters
        from forge.optimizer.one_launch import OneLaunchAdamW, held_in_kernel_types
        from forge.optimizer.update import GradientUpdate

        groups = parameter_groups(model, self.groups, self.weight_decay)
        betas, implementation = (self.beta1, self.beta2), self.implementation
        device = groups[0]["params"][0].device
        if implementation == "triton" and not (held_in_kernel_types(groups)
                                               and runs_on(device, "optimizer.implementation=triton", "fused")):
            implementation = "fused"
        if implementation == "triton":
            optimizer: torch.optim.Optimizer = OneLaunchAdamW(groups, self.lr, betas, self.eps, precision.master)
        else:
            optimizer = over_masters(precision.master, groups, lambda groups: torch.optim.AdamW(
                groups, lr=self.lr, betas=betas, eps=self.eps,
                foreach=implementation == "foreach", fused=implementation == "fused"))
        return GradientUpdate(optimizer, self.lr, self.clip, schedule, steps, precision)
