"""Operators whose results are worth keeping, as PyTorch's dispatcher sees them."""

from __future__ import annotations

from typing import Any

import torch
from torch._higher_order_ops.flex_attention import flex_attention

import forge.operators.epilogues  # noqa: F401     # defines forge::gelu_product

MATMUL = ("mm", "addmm", "bmm", "baddbmm", "_grouped_mm", "_scaled_mm")
ATTENTION = ("_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_for_cpu",
             "_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention")

FAMILIES: dict[str, frozenset[Any]] = {
    "matmul": frozenset([getattr(torch.ops.aten, name).default for name in MATMUL]
                        + [torch.ops.forge.gelu_product.default]),
    "attention": frozenset([getattr(torch.ops.aten, name).default for name in ATTENTION]
                           + [flex_attention]),
}
