"""One update of the weights, around any torch.optim optimizer: unscale, clip, skip if not finite, step, clear."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from forge.errors import ConfigError
from forge.optimizer import Outcome
from forge.parallel.spread import with_all_slices
from forge.precision import Precision
from forge.schedule import Schedule


class GradientUpdate:
    """See forge.optimizer.Update.

    optimizer: its groups hold "names" and "lr_scale". clip: the largest 2-norm of the gradient, or None.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, lr: float, clip: float | None, schedule: Schedule,
                 steps: int, precision: Precision) -> None:
        self.optimizer, self.lr, self.clip = optimizer, lr, clip
        self.schedule, self.steps, self.loss_scale = schedule, steps, precision.loss_scale
        self.over_masters = precision.master is not None
        self.state_dtype = getattr(torch, precision.master or precision.parameter)
        self.parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        self.names = [name for group in optimizer.param_groups for name in group["names"]]
        device = self.parameters[0].device
        self.scale = torch.full((), self.loss_scale.init_scale if self.loss_scale else 1.0, device=device)
        self.good_steps = torch.zeros((), dtype=torch.int32, device=device)     # since the scale last changed
        self.skipped = torch.zeros((), dtype=torch.int32, device=device)        # in a row
        self.step = 0
        self.inside = bool(optimizer.defaults.get("fused"))                     # unscales and skips in its kernel

    def __call__(self) -> Outcome:
        trained = [parameter for parameter in self.parameters if parameter.grad is not None]
        gradients = [parameter.grad for parameter in trained if parameter.grad is not None]
        wide = torch.promote_types(gradients[0].dtype, torch.float32)       # float64 cannot be narrowed in the sum
        norms = with_all_slices(trained, torch._foreach_norm(gradients, 2, wide))
        norm = torch.linalg.vector_norm(norms.float()) / self.scale
        finite = norm.isfinite()
        lr = self.lr * self.schedule(self.step, self.steps)
        for group in self.optimizer.param_groups:
            group["lr"] = lr * group["lr_scale"]
        self._apply(gradients, self._divisor(norm), finite)
        self.skipped = torch.where(finite, 0, self.skipped + 1)
        self._rescale(finite)
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1
        return Outcome(norm, finite, self.skipped, lr)

    def _divisor(self, norm: Tensor) -> Tensor | None:
        """What gradients are divided by: the loss scale, and what is too much of their norm."""
        if self.clip is None:
            return self.scale if self.loss_scale else None
        return self.scale * (norm / self.clip).clamp(min=1.0)

    def _apply(self, gradients: list[Tensor], divisor: Tensor | None, finite: Tensor) -> None:
        if self.inside:
            self.optimizer.grad_scale = divisor                 # type: ignore[attr-defined]  # GradScaler's seam
            self.optimizer.found_inf = (~finite).float()        # type: ignore[attr-defined]
            self.optimizer.step()
        elif bool(finite):                                      # reads the device: the price of these two
            if divisor is not None:
                torch._foreach_div_(gradients, divisor)
            self.optimizer.step()

    def _rescale(self, finite: Tensor) -> None:
        if self.loss_scale is None:
            return
        rule = self.loss_scale
        self.good_steps = torch.where(finite, self.good_steps + 1, 0)
        grows = self.good_steps >= rule.growth_interval
        factor = torch.where(finite, torch.where(grows, rule.growth_factor, 1.0), rule.backoff_factor)
        self.scale = self.scale * factor
        self.good_steps = torch.where(grows, 0, self.good_steps)

    def state_dict(self) -> dict[str, Any]:
        """Flat: "<parameter name>/<state name>" -> tensor, and the counters."""
        state: dict[str, Any] = {"step": self.step, "scale": self.scale, "good_steps": self.good_steps,
                                 "skipped": self.skipped}
        for name, parameter in zip(self.names, self.parameters, strict=True):
            for key, value in self.optimizer.state[parameter].items():
                state[f"{name}/{key}"] = value
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raises ConfigError where the state belongs to other parameters.

        torch's own load_state_dict is not used: it casts the moments to the dtype of the weights.
        """
        saved: dict[str, dict[str, Tensor]] = {}
        for path, value in state.items():
            if "/" in path:
                name, _, key = path.rpartition("/")
                saved.setdefault(name, {})[key] = value
        if saved and set(saved) != set(self.names):
            odd = sorted(set(saved) ^ set(self.names))
            raise ConfigError(f"The snapshot's optimizer state does not fit this model and optimizer.groups: "
                              f"{len(odd)} parameters differ, for example {odd[0]}.")
        if any(("master" in kept) is not self.over_masters for kept in saved.values()):
            raise ConfigError(f"The snapshot's optimizer state has {'no ' if self.over_masters else ''}float32 masters "
                              f"of the weights: set precision= as it was, or start again with from=.")
        for name, parameter in zip(self.names, self.parameters, strict=True):
            if name in saved:
                self._check_kind(name, parameter, set(saved[name]))
                self.optimizer.state[parameter] = {key: self._place(key, value, parameter)
                                                   for key, value in saved[name].items()}
        self.step = int(state["step"])
        device = self.scale.device
        self.skipped, self.good_steps = state["skipped"].to(device), state["good_steps"].to(device)
        if self.loss_scale is not None:
            self.scale = state["scale"].to(device)

    def _check_kind(self, name: str, parameter: Tensor, found: set[str]) -> None:
        """torch's optimizers would start without, or fail later, where the state is another optimizer's."""
        names = getattr(self.optimizer, "state_names", None)
        wanted = names(parameter) if names else {"step", "exp_avg", "exp_avg_sq"}
        if not wanted <= found:
            raise ConfigError(f"The snapshot's optimizer state is another optimizer's: {name} has "
                              f"{', '.join(sorted(found))}, and {', '.join(sorted(wanted))} is wanted. Set optimizer= "
                              f"as it was, or start again with from=.")

    def _place(self, key: str, value: Tensor, parameter: Tensor) -> Tensor:
        """Counters live on the host, except in the fused kernel; everything else beside its parameter."""
        if value.dim() and value.dtype != self.state_dtype:
            raise ConfigError(f"The snapshot's optimizer state is in {value.dtype}, and this run keeps it in "
                              f"{self.state_dtype}: set precision= as it was, or start again with from=.")
        return value.to("cpu" if key == "step" and not self.inside else parameter.device)
