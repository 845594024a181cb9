"""Attention of tokens to the tokens before them, each head with queries, keys and values from the hidden stream."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from forge.model import Parts
from forge.model.decoder import Decoder
from forge.model.rotary import rotate
from forge.operators.gate import gating


class SelfAttention(nn.Module):
    """[B, T, width] -> [B, T, width]. qkv.weight holds the rows of all queries, then all keys, then all values.
    gate.weight: one row a head, or one a number of each head."""

    def __init__(self, decoder: Decoder, parts: Parts) -> None:
        super().__init__()
        self.decoder, self.attend = decoder, parts.attention
        queries, keys = decoder.heads * decoder.head_width, decoder.kv_heads * decoder.head_width
        self.sizes = [queries, keys, keys]
        self.qkv = nn.Linear(decoder.width, sum(self.sizes), bias=bool(decoder.biases))
        self.out = nn.Linear(queries, decoder.width, bias=decoder.biases is True)
        if decoder.attention_gate != "none":
            gates = decoder.heads if decoder.attention_gate == "head" else queries
            self.gate, self.gated = nn.Linear(decoder.width, gates, bias=False), gating(parts.operators)
        if decoder.qk_norm != "none":
            over = [decoder.head_width] * 2 if decoder.qk_norm == "head" else [queries, keys]
            self.q_norm, self.k_norm = (parts.operators.norm(width, "rms", decoder.eps) for width in over)

    def forward(self, x: Tensor, rotation: Tensor | None, plan: Any) -> Tensor:
        q, k, v = project(x, self.qkv, self.sizes, self.decoder.fused_qkv)
        if self.decoder.qk_norm == "width":
            q, k = self.q_norm(q), self.k_norm(k)
        if self.decoder.clip_qkv is not None:
            q, k, v = (tensor.clamp(-self.decoder.clip_qkv, self.decoder.clip_qkv) for tensor in (q, k, v))
        q, k, v = (tensor.unflatten(-1, (-1, self.decoder.head_width)).transpose(1, 2) for tensor in (q, k, v))
        if self.decoder.qk_norm == "head":
            q, k = self.q_norm(q), self.k_norm(k)
        if rotation is not None:
            assert self.decoder.rotary is not None
            q, k = (rotate(tensor, rotation, self.decoder.rotary.interleaved) for tensor in (q, k))
        heads = self.attend(q, k, v, plan, self.decoder.dropout if self.training else 0.0)
        if self.decoder.attention_gate != "none":
            return self.out(self.gated(heads, self.gate(x)))    # type: ignore[no-any-return]
        return self.out(heads.transpose(1, 2).flatten(2))       # type: ignore[no-any-return]


def project(x: Tensor, linear: nn.Linear, sizes: list[int], fused: bool) -> tuple[Tensor, ...]:
    """linear(x), cut by `sizes`: as one product, or as one for each with the rows that it has in the same weight."""
    if fused:
        return linear(x).split(sizes, dim=-1)                   # type: ignore[no-any-return]
    weights = linear.weight.split(sizes)
    biases = [None] * len(weights) if linear.bias is None else linear.bias.split(sizes)
    return tuple(F.linear(x, weight, bias) for weight, bias in zip(weights, biases, strict=True))
