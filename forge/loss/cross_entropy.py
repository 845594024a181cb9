"""Cross-entropy of the next token from hidden states, summed over targets."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from forge.batch import IGNORED


def cross_entropy_sum(hidden: Tensor, head_weight: Tensor, targets: Tensor, pad_to: int) -> Tensor:
    """hidden [N, width], head_weight [vocabulary, width], targets [N] -> scalar, nats, at least float32.

    pad_to: on a GPU, the head gets rows of zeros up to a multiple of this, and their probability is zero.
    """
    vocabulary = head_weight.shape[0]
    missing = missing_rows(vocabulary, pad_to, hidden.device)
    logits = F.linear(hidden, F.pad(head_weight, (0, 0, 0, missing)) if missing else head_weight)
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if missing:     # a row that is not there has the probability zero; slicing it off would break the alignment again
        beyond = torch.arange(vocabulary + missing, device=hidden.device) >= vocabulary
        wide.masked_fill_(beyond, float("-inf"))
    return F.cross_entropy(wide, targets, ignore_index=IGNORED, reduction="sum")


def missing_rows(vocabulary: int, pad_to: int, device: torch.device) -> int:
    """What a head lacks to whole tiles on a GPU: GPT-2's 50,257 rows would take the slow path of its tensor cores for
    the sake of 47."""
    return -vocabulary % pad_to if device.type == "cuda" else 0


def chunked_cross_entropy_sum(hidden: Tensor, head_weight: Tensor, targets: Tensor, pad_to: int,
                              chunk_tokens: int) -> Tensor:
    """The same with at most chunk_tokens rows of logits alive."""
    chunks = zip(torch.split(hidden, chunk_tokens), torch.split(targets, chunk_tokens), strict=True)
    totals = [checkpoint(cross_entropy_sum, rows, head_weight, wanted, pad_to,
                         use_reentrant=False, preserve_rng_state=False)
              for rows, wanted in chunks]
    return torch.stack(totals).sum()
