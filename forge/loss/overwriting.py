"""Cross-entropy that leaves the gradient where the logits were."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from forge.batch import IGNORED
from forge.kernels import runs_on
from forge.loss.cross_entropy import missing_rows


def overwriting_cross_entropy_sum(hidden: Tensor, head_weight: Tensor, targets: Tensor, scale: Tensor,
                                  pad_to: int) -> tuple[Tensor, Tensor]:
    """hidden [N, width], head_weight [vocabulary, width], targets [N], scale scalar -> (sum * scale, sum): see
    forge.loss.Loss."""
    device = hidden.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        hidden, head_weight = hidden.to(dtype), head_weight.to(dtype)
    vocabulary = head_weight.shape[0]
    missing = missing_rows(vocabulary, pad_to, hidden.device)
    padded = F.pad(head_weight, (0, 0, 0, missing)) if missing else head_weight
    with torch.autocast(device, enabled=False):
        scaled, total = _Overwriting.apply(             # type: ignore[no-untyped-call]
            hidden, padded, targets, scale, vocabulary)
    return scaled, total


class _Overwriting(torch.autograd.Function):
    """The gradient of the logits is known as soon as the logits are, since the scale of the loss is: so forward
    computes it, and backward has only the two matrix products left."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, scale: Tensor,
                vocabulary: int) -> tuple[Tensor, Tensor]:
        losses, gradient = losses_and_gradient(hidden, weight, targets, scale, vocabulary)
        ctx.save_for_backward(gradient, hidden, weight)
        total = losses.sum()
        ctx.mark_non_differentiable(total)
        return total * scale, total

    @staticmethod
    def backward(ctx: Any, incoming: Tensor, unused: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        gradient, hidden, weight = ctx.saved_tensors
        factor = incoming.to(gradient.dtype)                # 1 in training
        by_hidden = (gradient @ weight) * factor if ctx.needs_input_grad[0] else None
        by_weight = (gradient.t() @ hidden) * factor if ctx.needs_input_grad[1] else None
        return by_hidden, by_weight, None, None, None


@torch.library.custom_op("forge::losses_and_gradient", mutates_args=())
def losses_and_gradient(hidden: Tensor, weight: Tensor, targets: Tensor, scale: Tensor,
                        vocabulary: int) -> tuple[Tensor, Tensor]:
    """(loss of each row [N], at least float32; gradient of sum * scale by the logits [N, rows of weight]).

    One operator for compiled code too, which might otherwise keep the logits and copy them.
    vocabulary: rows of `weight` that are real; the others pad it.
    """
    logits = hidden @ weight.t()
    if logits.dtype is not torch.float64 and runs_on(logits.device, "loss=inplace", "its plain twin"):
        from forge.kernels.cross_entropy import overwrite

        return overwrite(logits, targets, scale, vocabulary), logits
    return overwrite_plainly(logits, targets, scale, vocabulary), logits


@losses_and_gradient.register_fake
def _(hidden: Tensor, weight: Tensor, targets: Tensor, scale: Tensor, vocabulary: int) -> tuple[Tensor, Tensor]:
    wide = torch.promote_types(hidden.dtype, torch.float32)
    return (hidden.new_empty(hidden.shape[0], dtype=wide), hidden.new_empty(hidden.shape[0], weight.shape[0]))


def overwrite_plainly(logits: Tensor, targets: Tensor, scale: Tensor, vocabulary: int) -> Tensor:
    """The loss of each row [N], at least float32, 0 where the target is IGNORED. logits [N, columns] become the
    gradient of sum * scale by them: (softmax - one at the target) * scale; 0 in ignored rows and beyond the
    vocabulary."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    counted = targets != IGNORED
    wanted = targets.clamp(min=0)[:, None]
    log_probability = wide[:, :vocabulary].log_softmax(-1)
    losses = torch.where(counted, -log_probability.gather(1, wanted)[:, 0], 0)
    gradient = log_probability.exp()
    gradient.scatter_add_(1, wanted, torch.full_like(wanted, -1, dtype=gradient.dtype))
    logits.zero_()
    logits[:, :vocabulary] = torch.where(counted[:, None], gradient * scale, 0)
    return losses
