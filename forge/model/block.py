"""One block of the decoder."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from forge.model import Parts
from forge.model.decoder import Decoder
from forge.model.rotary import rotate


class SelfAttention(nn.Module):
    """[B, T, width] -> [B, T, width]. qkv.weight holds the rows of all queries, then all keys, then all values."""

    def __init__(self, decoder: Decoder, parts: Parts) -> None:
        super().__init__()
        self.decoder, self.attend = decoder, parts.attention
        queries, keys = decoder.heads * decoder.head_width, decoder.kv_heads * decoder.head_width
        self.sizes = [queries, keys, keys]
        self.qkv = nn.Linear(decoder.width, sum(self.sizes), bias=decoder.biases)
        self.out = nn.Linear(queries, decoder.width, bias=decoder.biases)
        if decoder.qk_norm != "none":
            over = [decoder.head_width] * 2 if decoder.qk_norm == "head" else [queries, keys]
            self.q_norm, self.k_norm = (parts.operators.norm(width, "rms", decoder.eps) for width in over)

    def forward(self, x: Tensor, rotation: Tensor | None, plan: Any) -> Tensor:
        q, k, v = self._project(x)
        if self.decoder.qk_norm == "width":
            q, k = self.q_norm(q), self.k_norm(k)
        if self.decoder.clip_qkv is not None:
            q, k, v = (tensor.clamp(-self.decoder.clip_qkv, self.decoder.clip_qkv) for tensor in (q, k, v))
        q, k, v = (tensor.unflatten(-1, (-1, self.decoder.head_width)).transpose(1, 2) for tensor in (q, k, v))
        if self.decoder.qk_norm == "head":
            q, k = self.q_norm(q), self.k_norm(k)
        if rotation is not None:
            q, k = rotate(q, rotation), rotate(k, rotation)
        heads = self.attend(q, k, v, plan, self.decoder.dropout if self.training else 0.0)
        return self.out(heads.transpose(1, 2).flatten(2))       # type: ignore[no-any-return]

    def _project(self, x: Tensor) -> tuple[Tensor, ...]:
        """Queries, keys and values: as one product, or as three with the rows that each has in the same weight."""
        if self.decoder.fused_qkv:
            return self.qkv(x).split(self.sizes, dim=-1)        # type: ignore[no-any-return]
        weights = self.qkv.weight.split(self.sizes)
        biases = [None] * len(weights) if self.qkv.bias is None else self.qkv.bias.split(self.sizes)
        return tuple(F.linear(x, weight, bias) for weight, bias in zip(weights, biases, strict=True))


class Block(nn.Module):
    """Attention and feed-forward, each normalised before and added after."""

    def __init__(self, decoder: Decoder, parts: Parts) -> None:
        super().__init__()
        self.routing, self.dropout = decoder.routing, decoder.dropout
        self.attention_norm = parts.operators.norm(decoder.width, decoder.norm, decoder.eps)
        self.attention = SelfAttention(decoder, parts)
        self.feed_forward_norm = parts.operators.norm(decoder.width, decoder.norm, decoder.eps)
        if decoder.routing is None:
            self.feed_forward = parts.operators.feed_forward(
                decoder.width, decoder.hidden, decoder.activation, decoder.biases)
        else:
            self.feed_forward = parts.moe_router.build(decoder.width, decoder.hidden, decoder.routing)

    def forward(self, x: Tensor, aux: Tensor, rotation: Tensor | None, valid: Tensor | None,
                plan: Any) -> tuple[Tensor, Tensor, Tensor]:
        """x: [B, T, width]. aux: scalar float32, the auxiliary losses of the blocks before.

        Returns (x, aux, load [num_experts], empty for a dense block). What a block learns about its load it returns,
        and stores nowhere: so it survives checkpointing, which runs forward twice, and compilation.
        """
        x = self._add(x, self.attention(self.attention_norm(x), rotation, plan))
        normed = self.feed_forward_norm(x)
        if self.routing is None:
            return self._add(x, self.feed_forward(normed)), aux, aux.new_zeros(0)
        y, own_aux, load = self.feed_forward(normed, valid)
        return self._add(x, y), aux + own_aux, load

    def _add(self, x: Tensor, branch: Tensor) -> Tensor:
        """The hidden stream keeps its dtype, whichever dtype the branch was computed in."""
        return x + F.dropout(branch, self.dropout, self.training).to(x.dtype)
