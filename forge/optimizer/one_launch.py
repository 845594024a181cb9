"""AdamW over all parameters in one launch of forge's own kernel."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from forge.kernels.adamw import Tables


def held_in_kernel_types(groups: list[dict[str, Any]]) -> bool:
    """Whether the weights have one dtype that the kernel knows. Float64, in which forge.verify computes, is none."""
    dtypes = {weight.dtype for group in groups for weight in group["params"]}
    return len(dtypes) == 1 and dtypes <= {torch.float32, torch.bfloat16, torch.float16}


class OneLaunchAdamW(torch.optim.Optimizer):
    """See forge.kernels.adamw. master: the dtype of masters, or None: the weights are updated themselves.

    State of a parameter: "exp_avg", "exp_avg_sq", "step" (on the device, one tensor for all), and "master" if there
    are masters. All parameters have one dtype.
    """

    def __init__(self, groups: list[dict[str, Any]], lr: float, betas: tuple[float, float], eps: float,
                 master: str | None) -> None:
        super().__init__(groups, {"lr": lr, "fused": True})
        self.how = {"beta1": betas[0], "beta2": betas[1], "eps": eps}
        self.master = None if master is None else getattr(torch, master)
        self.grad_scale: Tensor | None = None               # GradScaler's seam, as in torch's fused optimizers
        self.found_inf: Tensor | None = None
        self.device = self.param_groups[0]["params"][0].device
        self.betas = torch.tensor(betas, dtype=torch.float64, device=self.device)
        self.tables: dict[tuple[int, ...], Tables] = {}     # by which parameters have a gradient

    @torch.no_grad()
    def step(self, closure: None = None) -> None:           # type: ignore[override]
        from forge.kernels.adamw import Tables, adamw

        trained = [(weight, group) for group in self.param_groups for weight in group["params"]
                   if weight.grad is not None]
        if not trained:
            return
        key = tuple(id(weight) for weight, _ in trained)
        if key not in self.tables:
            self.tables[key] = Tables([weight.numel() for weight, _ in trained], self.device)
        step = self._step([weight for weight, _ in trained])
        skip = torch.zeros((), device=self.device) if self.found_inf is None else self.found_inf
        divisor = torch.ones((), device=self.device) if self.grad_scale is None else self.grad_scale
        step.add_(1 - skip)
        adamw(self.tables[key], [self._row(weight) for weight, _ in trained],
              [(group["lr"], group["weight_decay"]) for _, group in trained],
              1 - self.betas ** step, divisor, skip, self.how)

    def _step(self, weights: list[Tensor]) -> Tensor:
        """Updates done, the same tensor for all. A snapshot brings one for each."""
        known = [state["step"] for state in self.state.values() if "step" in state]
        step: Tensor = known[0] if known else torch.zeros((), device=self.device)
        for weight in weights:
            self.state[weight]["step"] = step
        return step

    def _row(self, weight: Tensor) -> tuple[Tensor, ...]:
        """(gradient, weight, master, exp_avg, exp_avg_sq)"""
        state = self.state[weight]
        if "exp_avg" not in state:
            if self.master is not None:
                state["master"] = weight.detach().to(self.master)
            kept = state.get("master", weight)
            state |= {"exp_avg": torch.zeros_like(kept), "exp_avg_sq": torch.zeros_like(kept)}
        assert weight.grad is not None
        return weight.grad.contiguous(), weight, state.get("master", weight), state["exp_avg"], state["exp_avg_sq"]
