"""PyTorch's scaled_dot_product_attention: which of its kernels runs, and what is said where it cannot."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from forge.attention.heads import HALF, compute_dtype, repeat
from forge.attention.mask import is_plain, mask
from forge.notes import say

if TYPE_CHECKING:
    from forge.attention import Layout

Kernel = Literal["flash", "cudnn"]
BACKENDS = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}
OLDEST = (8, 0)         # compute capability of the A100, the first GPU that PyTorch has these kernels for


@dataclass(frozen=True)
class Choice:
    """mask: [B or 1, 1, T, T] bool, or None where `causal` says all there is to say.

    kernel: this one, or an error; None: PyTorch chooses.
    """

    mask: Tensor | None
    causal: bool
    kernel: Kernel | None


def choose(layout: Layout, kernel: Kernel | None) -> Choice:
    """The kernel that was asked for, or sdpa where documents or a window are to be hidden, which none of them knows."""
    if not is_plain(layout):
        if kernel is not None:
            say(f"attention={kernel} knows no documents and no window: this run takes sdpa with a mask "
                f"(attention=flex has a kernel for them on a GPU).")
        return Choice(mask(layout), causal=False, kernel=None)
    if kernel is not None and not _has(layout.device, kernel):
        kernel = None
    # A mask, even a causal one, would rule out the flash kernels. cuDNN has none for a single token.
    return Choice(None, layout.causal, kernel if layout.length > 1 else None)


def attend(q: Tensor, k: Tensor, v: Tensor, choice: Choice, dropout: float) -> Tensor:
    """See forge.attention.Attention."""
    kernel = choice.kernel
    if kernel is None or (kernel == "flash" and dropout > 0 and not q.is_cuda and _say_no_dropout()):
        return _attend(q, k, v, choice, dropout)
    with sdpa_kernel(BACKENDS[kernel]):
        return _attend(q, k, v, choice, dropout)


def _attend(q: Tensor, k: Tensor, v: Tensor, choice: Choice, dropout: float) -> Tensor:
    grouped = q.shape[1] != k.shape[1] and _knows_groups(q, choice)
    if not grouped:
        k, v = repeat(q, k, v)
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=choice.mask, is_causal=choice.causal, dropout_p=dropout, enable_gqa=grouped)


def _knows_groups(q: Tensor, choice: Choice) -> bool:
    """Only the flash and cuDNN kernels share keys among heads; asked of others, PyTorch takes the unfused path."""
    return q.is_cuda and choice.mask is None and compute_dtype(q) in HALF


def _has(device: torch.device, kernel: Kernel) -> bool:
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < OLDEST:
        say(f"attention={kernel} needs a GPU of compute capability {OLDEST[0]}.{OLDEST[1]}: this run takes sdpa.")
        return False
    if device.type != "cuda" and kernel == "cudnn":
        say("attention=cudnn needs an NVIDIA GPU: this run takes sdpa.")
        return False
    return True


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]     # compiled code says it while it is traced
def _say_no_dropout() -> bool:
    say("attention=flash has no dropout on a CPU: training takes sdpa.")
    return True
