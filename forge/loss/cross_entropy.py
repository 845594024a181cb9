"""Cross-entropy of the next token from hidden states, summed over targets."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from forge.batch import IGNORED


def cross_entropy_sum(hidden: Tensor, head_weight: Tensor, targets: Tensor) -> Tensor:
    """hidden [N, width], head_weight [vocabulary, width], targets [N] -> scalar, nats, at least float32."""
    logits = F.linear(hidden, head_weight)
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(wide, targets, ignore_index=IGNORED, reduction="sum")


def chunked_cross_entropy_sum(hidden: Tensor, head_weight: Tensor, targets: Tensor, chunk_tokens: int) -> Tensor:
    """The same with at most chunk_tokens rows of logits alive."""
    chunks = zip(torch.split(hidden, chunk_tokens), torch.split(targets, chunk_tokens), strict=True)
    totals = [checkpoint(cross_entropy_sum, rows, head_weight, wanted, use_reentrant=False, preserve_rng_state=False)
              for rows, wanted in chunks]
    return torch.stack(totals).sum()
