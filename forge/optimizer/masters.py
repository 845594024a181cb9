"""Weights in half precision, their updates in float32: the optimizer keeps a float32 master of each weight.

An update is often smaller than the last bit of a half-precision weight. Added to a master, it is not lost
(Micikevicius et al. 2018).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

Groups = list[dict[str, Any]]


def over_masters(master: str | None, groups: Groups,
                 make: Callable[[Groups], torch.optim.Optimizer]) -> torch.optim.Optimizer:
    """What `make` builds from the groups, run on masters of this dtype; on the weights themselves if it is None."""
    return make(groups) if master is None else OverMasters(groups, make, getattr(torch, master))


class OverMasters(torch.optim.Optimizer):
    """Any torch.optim optimizer, run on masters. The plain way: it casts all gradients, updates, and casts back.

    make: builds it from parameter groups. State of a parameter: that of its master, and "master" itself.
    """

    def __init__(self, groups: Groups, make: Callable[[Groups], torch.optim.Optimizer], dtype: torch.dtype) -> None:
        super().__init__(groups, {})
        of_masters = [group | {"params": [weight.detach().to(dtype) for weight in group["params"]]}
                      for group in groups]
        self.inner = make(of_masters)
        self.fused = bool(self.inner.defaults.get("fused"))
        self.defaults = self.inner.defaults | {"fused": True}       # as far as the update sees: it unscales and skips
        self.pairs = [pair for ours, theirs in zip(self.param_groups, self.inner.param_groups, strict=True)
                      for pair in zip(ours["params"], theirs["params"], strict=True)]
        self.grad_scale: Tensor | None = None                       # GradScaler's seam
        self.found_inf: Tensor | None = None

    def state_names(self, parameter: nn.Parameter) -> set[str]:
        """What a snapshot must hold for a parameter: what the optimizer on the masters wants."""
        names = getattr(self.inner, "state_names", None)
        return names(dict(self.pairs)[parameter]) if names else {"step", "exp_avg", "exp_avg_sq"}

    @torch.no_grad()
    def step(self, closure: None = None) -> None:           # type: ignore[override]
        self._adopt()
        for ours, theirs in zip(self.param_groups, self.inner.param_groups, strict=True):
            theirs.update({name: value for name, value in ours.items() if name != "params"})
        for weight, master in self.pairs:
            master.grad = None if weight.grad is None else weight.grad.to(master.dtype)
        self._step()
        self.inner.zero_grad(set_to_none=True)
        for weight, master in self.pairs:
            weight.copy_(master)
            if self.inner.state[master]:
                self.state[weight] = self.inner.state[master]
                self.state[weight]["master"] = master

    def _step(self) -> None:
        if self.fused:
            self.inner.grad_scale, self.inner.found_inf = self.grad_scale, self.found_inf   # type: ignore[attr-defined]
        elif self.found_inf is not None and bool(self.found_inf):   # reads the device, as these optimizers do anyway
            return
        elif self.grad_scale is not None:
            for _, master in self.pairs:                            # here, where it is float32
                if master.grad is not None:
                    master.grad.div_(self.grad_scale)
        self.inner.step()

    def _adopt(self) -> None:
        """State that was loaded belongs to the masters. Until its first step, a master is the weight, whatever was
        put into it since the optimizer was built."""
        for weight, master in self.pairs:
            loaded = self.state[weight]
            if not loaded and not self.inner.state[master]:
                master.copy_(weight)
            elif "master" in loaded and loaded is not self.inner.state[master]:
                master.copy_(loaded["master"])
                self.inner.state[master] = loaded | {"master": master}
                if not self.fused and "step" in loaded:             # torch's unfused optimizers count on the host
                    self.inner.state[master]["step"] = loaded["step"].cpu()
