"""The step of optimizer=lars, over lists of tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from forge.optimizer.on_device import OnDevice, Verdict, matrices, with_gradient


class Layerwise(OnDevice):
    """For a matrix w with gradient g, norms in float32 at least (You et al. 2017, algorithm 1):

        rate = trust * |w| / (|g| + weight_decay * |w|)
        v = momentum * v + lr * rate * (g + weight_decay * w);  w -= v

    rate is 1 where |w| or the divisor is 0, and for vectors: a bias starts at 0, and would stay there.
    Of experts stacked in one tensor each is a layer.
    """

    def __init__(self, groups: list[dict[str, Any]], lr: float, trust: float, momentum: float) -> None:
        super().__init__(groups, lr=lr, trust=trust, momentum=momentum)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:   # type: ignore[override]
        verdict = self.verdict()
        for group in self.param_groups:
            for is_matrix in (True, False):
                self._step(group, is_matrix, verdict)

    def _step(self, group: dict[str, Any], is_matrix: bool, verdict: Verdict) -> None:
        chosen = with_gradient([weight for weight in group["params"] if (weight.dim() >= 2) == is_matrix])
        weights: list[Tensor] = [*chosen]
        if not chosen:
            return
        gradients, momenta = self.finite_gradients(chosen, verdict), self.momenta(chosen)
        if is_matrix:
            weights, gradients, momenta = map(matrices, (weights, gradients, momenta))
            rates = self._rates(weights, gradients, group)
        else:
            rates = [torch.ones_like(verdict.applied)] * len(weights)
        changes = torch._foreach_add(gradients, weights, alpha=group["weight_decay"])
        torch._foreach_mul_(changes, [rate * group["lr"] * verdict.applied for rate in rates])
        torch._foreach_mul_(momenta, verdict.kept(group["momentum"]))
        torch._foreach_add_(momenta, changes)
        torch._foreach_sub_(weights, torch._foreach_mul(momenta, verdict.applied))

    def _rates(self, weights: list[Tensor], gradients: list[Tensor], group: dict[str, Any]) -> list[Tensor]:
        wide = torch.promote_types(weights[0].dtype, torch.float32)
        sizes, slopes = (torch.stack(torch._foreach_norm(each, 2, wide)) for each in (weights, gradients))
        divisors = slopes + group["weight_decay"] * sizes
        adapted = group["trust"] * sizes / divisors
        return list(torch.where((sizes > 0) & (divisors > 0), adapted, 1.0).unbind())
