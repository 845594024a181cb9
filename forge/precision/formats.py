"""The number formats of a model's weights, of its hidden stream and of its products."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch import Tensor, nn


def hold(model: nn.Module, parameter: str, residual: str | None) -> nn.Module:
    """Weights in the dtype `parameter`, the hidden stream in `residual`. Buffers, such as the frequencies of a rotary
    embedding, keep theirs."""
    dtype = getattr(torch, parameter)
    for weight in model.parameters():
        weight.data = weight.data.to(dtype)             # in place, so that tied weights stay tied
    trainable: Any = model
    trainable.residual_dtype = None if residual is None else getattr(torch, residual)
    return model


def allow_tf32(allowed: bool) -> None:
    """Whether products of float32 may be computed in TF32, in the whole process."""
    torch.set_float32_matmul_precision("high" if allowed else "highest")
    torch.backends.cudnn.allow_tf32 = allowed


def autocast(device_type: str, compute: str, cache_enabled: bool) -> AbstractContextManager[None]:
    return torch.autocast(device_type, getattr(torch, compute), cache_enabled=cache_enabled)


def autocast_blocks(model: nn.Module, compute: str, cache_enabled: bool) -> None:
    """Autocast inside each block only."""
    trainable: Any = model
    for blocks in trainable.block_lists():
        for block in blocks:
            block.forward = InAutocast(block.forward, compute, cache_enabled)


@dataclass(frozen=True, eq=False)
class InAutocast:
    """Stands in for a block's forward. A class and not a closure, so that a deep copy of the block is bound to the
    copy."""

    forward: Callable[..., Any]
    compute: str
    cache_enabled: bool

    def __call__(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        with autocast(hidden.device.type, self.compute, self.cache_enabled):
            return self.forward(hidden, *args, **kwargs)
