"""What lists of tensors need to unscale gradients and to skip an update without a word from the host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn


class Verdict(NamedTuple):
    """Scalars on the device. applied: 1, or 0 where the update is skipped. skipped: its opposite, as bool."""

    applied: Tensor
    skipped: Tensor

    def kept(self, decay: float) -> Tensor:
        """What a moment is multiplied by: `decay`, or 1 where the update is skipped."""
        return torch.where(self.skipped, 1.0, decay)


class OnDevice(torch.optim.Optimizer):
    """An optimizer that keeps one moment a weight, and takes over what torch's fused kernels do for GradientUpdate.

    grad_scale: what gradients are divided by, or None. found_inf: scalar, 1 where a gradient is not finite. Both are
    set before each step, by GradientUpdate, which knows by defaults["fused"] that nothing has to be read from the
    device.
    """

    grad_scale: Tensor | None = None
    found_inf: Tensor | None = None

    def __init__(self, groups: list[dict[str, Any]], **defaults: Any) -> None:
        super().__init__(groups, {"fused": True, **defaults})

    def state_names(self, parameter: nn.Parameter) -> set[str]:
        """What a snapshot must hold for a parameter."""
        return {"momentum"}

    def verdict(self) -> Verdict:
        device = self.param_groups[0]["params"][0].device
        found = torch.zeros((), device=device) if self.found_inf is None else self.found_inf
        return Verdict(1.0 - found, found > 0)

    def finite_gradients(self, parameters: list[nn.Parameter], verdict: Verdict) -> list[Tensor]:
        """Unscaled in place; zeros where the update is skipped, since what is not finite survives a product with 0."""
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        if self.grad_scale is not None:
            torch._foreach_div_(gradients, self.grad_scale)
        for gradient in gradients:
            gradient.masked_fill_(verdict.skipped, 0.0)
        return gradients

    def momenta(self, parameters: list[nn.Parameter]) -> list[Tensor]:
        """The moment of each, zeros at first, in the dtype of its parameter."""
        for parameter in parameters:
            if "momentum" not in self.state[parameter]:
                self.state[parameter]["momentum"] = torch.zeros_like(parameter)
        return [self.state[parameter]["momentum"] for parameter in parameters]


def with_gradient(parameters: list[nn.Parameter]) -> list[nn.Parameter]:
    return [parameter for parameter in parameters if parameter.grad is not None]


def matrices(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Views: the experts of a layer, stacked in one tensor, are matrices of their own."""
    return [matrix for tensor in tensors
            for matrix in ([tensor] if tensor.dim() == 2 else matrices(tensor.unbind()))]
