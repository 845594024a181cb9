"""The step of optimizer=muon: matrices of one shape are made orthogonal together, and AdamW updates the rest."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from forge.errors import ConfigError
from forge.optimizer.on_device import OnDevice, Verdict, matrices, with_gradient

if TYPE_CHECKING:
    from forge.optimizer.muon import ByAdamW, Muon

Groups = list[dict[str, Any]]

COEFFICIENTS = (3.4445, -4.7750, 2.0315)    # Jordan 2024: the steepest at 0 that still end near 1
SMALLEST_NORM = 1e-7                        # as in torch.optim.Muon
TOGETHER = 2 ** 26                          # numbers made orthogonal at once: bounds the memory of the iterations


def shared_out(groups: Groups, adamw: ByAdamW, lr: float) -> tuple[Groups, Groups]:
    """(what Muon updates, what AdamW does), with "lr_scale" made relative to `lr`. Raises ConfigError where there is
    nothing for Muon."""
    own: Groups = []
    rest: Groups = []
    for group in groups:
        for by_adamw, found in ((False, own), (True, rest)):
            pairs = [(name, weight) for name, weight in zip(group["names"], group["params"], strict=True)
                     if by_adamw == (weight.dim() < 2 or any(fnmatchcase(name, each) for each in adamw.match))]
            if pairs:
                factor = adamw.lr / lr if by_adamw else 1.0
                found.append({**group, "names": [name for name, _ in pairs], "params": [weight for _, weight in pairs],
                              "lr_scale": group["lr_scale"] * factor})
    if not own:
        raise ConfigError(f"optimizer.adamw.match={adamw.match} leaves no matrix for optimizer=muon: shorten it, or "
                          f"set optimizer=adamw.")
    return own, rest


class Orthogonal(OnDevice):
    """For a matrix w with gradient g, as torch.optim.Muon:

        v = momentum * v + (1 - momentum) * g;  u = orthogonal(v), or of momentum * v + (1 - momentum) * g by Nesterov
        w -= lr * weight_decay * w + lr * adjustment * u

    Experts stacked in one tensor are matrices of their own. AdamW's groups stand beside Muon's in param_groups, and
    its state beside Muon's in state.
    """

    def __init__(self, own: Groups, rest: Groups, settings: Muon) -> None:
        super().__init__(own, lr=settings.lr)
        self.settings, self.own = settings, list(self.param_groups)
        self.adamw: torch.optim.AdamW | None = None
        if rest:
            self.adamw = torch.optim.AdamW(rest, lr=settings.adamw.lr, eps=settings.adamw.eps, fused=True,
                                           betas=(settings.adamw.beta1, settings.adamw.beta2))
            self.adamw.state = self.state
            self.param_groups += self.adamw.param_groups
        self.by_adamw = {weight for group in self.param_groups[len(self.own):] for weight in group["params"]}
        device = own[0]["params"][0].device
        half = settings.products == "bfloat16" or (settings.products == "auto" and device.type != "cpu")
        self.products = torch.bfloat16 if half else torch.float32

    def state_names(self, parameter: nn.Parameter) -> set[str]:
        return {"step", "exp_avg", "exp_avg_sq"} if parameter in self.by_adamw else {"momentum"}

    @torch.no_grad()
    def step(self, closure: None = None) -> None:   # type: ignore[override]
        verdict = self.verdict()
        for group in self.own:
            self._step(group, verdict)
        if self.adamw is not None:
            self.adamw.grad_scale = self.grad_scale         # type: ignore[attr-defined]  # GradScaler's seam
            self.adamw.found_inf = self.found_inf           # type: ignore[attr-defined]
            self.adamw.step()

    def _step(self, group: dict[str, Any], verdict: Verdict) -> None:
        chosen = with_gradient(group["params"])
        if not chosen:
            return
        gradients, momenta = self.finite_gradients(chosen, verdict), self.momenta(chosen)
        momentum = self.settings.momentum
        torch._foreach_mul_(momenta, verdict.kept(momentum))
        torch._foreach_add_(momenta, gradients, alpha=1 - momentum)
        directions: Sequence[Tensor] = momenta
        if self.settings.nesterov:
            directions = torch._foreach_mul(momenta, momentum)
            torch._foreach_add_(directions, gradients, alpha=1 - momentum)
        weights = matrices([*chosen])
        torch._foreach_mul_(weights, 1.0 - verdict.applied * (group["lr"] * group["weight_decay"]))
        for places, batch in _by_shape(matrices(directions)):
            step = orthogonal(batch.to(self.products), self.settings.iterations).to(weights[places[0]].dtype)
            step = step * (verdict.applied * (group["lr"] * self._adjustment(batch.shape)))
            torch._foreach_sub_([weights[place] for place in places], list(step.unbind()))

    def _adjustment(self, shape: torch.Size) -> float:
        """shape: [..., m, n]."""
        rows, columns = shape[-2:]
        if self.settings.adjust_lr == "original":
            return math.sqrt(max(1.0, rows / columns))
        return 0.2 * math.sqrt(max(rows, columns))


def _by_shape(tensors: list[Tensor]) -> list[tuple[list[int], Tensor]]:
    """(places in the list, the matrices there [n, rows, columns]), each of at most TOGETHER numbers or one matrix."""
    alike: dict[torch.Size, list[int]] = defaultdict(list)
    for place, tensor in enumerate(tensors):
        alike[tensor.shape].append(place)
    cut = [places[start:start + most] for shape, places in alike.items() for most in [max(1, TOGETHER // shape.numel())]
           for start in range(0, len(places), most)]
    return [(places, torch.stack([tensors[place] for place in places])) for places in cut]


def orthogonal(batch: Tensor, iterations: int) -> Tensor:
    """[n, rows, columns] -> the same: each U S V^T becomes about U V^T, with singular values between 0.7 and 1.2.

    Quintic Newton-Schulz iteration (Jordan 2024), on the transposed where that makes the products smaller.
    """
    a, b, c = COEFFICIENTS
    tall = batch.shape[-2] > batch.shape[-1]
    x = batch.mT if tall else batch
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=SMALLEST_NORM)     # no singular value above 1
    for _ in range(iterations):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x
