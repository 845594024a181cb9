"""PyTorch's scaled_dot_product_attention, which chooses the kernel by what the device and the arguments allow."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch.nn.functional as F

from forge.attention.heads import HALF, compute_dtype, repeat
from forge.attention.mask import is_plain, mask

if TYPE_CHECKING:
    from torch import Tensor

    from forge.attention import Layout


@dataclass(frozen=True)
class Choice:
    """mask: [B or 1, 1, T, T] bool, or None where `causal` says all there is to say.

    exact: the option's own kernel, or an error; otherwise PyTorch chooses.
    """

    mask: Tensor | None
    causal: bool
    exact: bool


@dataclass(frozen=True)
class SDPA:
    """No mask in memory for causal attention; one of B x T x T bytes for documents and windows."""

    def plan(self, layout: Layout) -> Choice:
        if is_plain(layout):                        # a mask, even a causal one, would rule out the flash kernels
            return Choice(None, layout.causal, exact=False)
        return Choice(mask(layout), causal=False, exact=False)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, plan: Choice, dropout: float) -> Tensor:
        grouped = q.shape[1] != k.shape[1] and _knows_groups(q, plan)
        if not grouped:
            k, v = repeat(q, k, v)
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=plan.mask, is_causal=plan.causal, dropout_p=dropout, enable_gqa=grouped)


def _knows_groups(q: Tensor, plan: Choice) -> bool:
    """Only the flash and cuDNN kernels share keys among heads; asked of others, PyTorch takes the unfused path."""
    return q.is_cuda and plan.mask is None and compute_dtype(q) in HALF
