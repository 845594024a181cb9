"""Cross-entropy of the next token from hidden states, summed over targets."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from forge.batch import IGNORED

TILE = 64       # rows of the head: what 16-byte loads and the tiles of cuBLAS divide into


def cross_entropy_sum(hidden: Tensor, head_weight: Tensor, targets: Tensor) -> Tensor:
    """hidden [N, width], head_weight [vocabulary, width], targets [N] -> scalar, nats, at least float32."""
    logits = _logits(hidden, head_weight)
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(wide, targets, ignore_index=IGNORED, reduction="sum")


def _logits(hidden: Tensor, head_weight: Tensor) -> Tensor:
    """[N, vocabulary]. On a GPU the product is made over a whole number of tiles: GPT-2's 50,257 rows would take its
    tensor cores' slow path, for the sake of 47."""
    vocabulary = head_weight.shape[0]
    missing = -vocabulary % TILE if hidden.is_cuda else 0
    if not missing:
        return F.linear(hidden, head_weight)
    return F.linear(hidden, F.pad(head_weight, (0, 0, 0, missing)))[:, :vocabulary]


def chunked_cross_entropy_sum(hidden: Tensor, head_weight: Tensor, targets: Tensor, chunk_tokens: int) -> Tensor:
    """The same with at most chunk_tokens rows of logits alive."""
    chunks = zip(torch.split(hidden, chunk_tokens), torch.split(targets, chunk_tokens), strict=True)
    totals = [checkpoint(cross_entropy_sum, rows, head_weight, wanted, use_reentrant=False, preserve_rng_state=False)
              for rows, wanted in chunks]
    return torch.stack(totals).sum()
