"""Multi-head latent attention (DeepSeek-V2, 2024)."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from forge.model import Parts
from forge.model.decoder import Decoder
from forge.model.positions import YaRN
from forge.model.rotary import rotate
from forge.model.self_attention import project


class LatentAttention(nn.Module):
    """[B, T, width] -> [B, T, width].

    qkv.weight holds the rows of the queries' latent (or of all queries, where they have none), then of the latent of
    keys and values, then of the key that carries positions. q_up.weight: of each head, first the rows without
    positions, then those with. kv_up.weight: of each head, first the rows of its keys, then of its values.
    """

    def __init__(self, decoder: Decoder, parts: Parts) -> None:
        super().__init__()
        assert decoder.latent is not None and decoder.rotary is not None
        self.decoder, self.attend, self.latent = decoder, parts.attention, decoder.latent
        self.interleaved, scaling = decoder.rotary.interleaved, decoder.rotary.scaling
        self.of_scores = scaling.of_scores if isinstance(scaling, YaRN) else 1.0
        self.cut = [decoder.head_width - self.latent.rotary_width, self.latent.rotary_width]    # of a query or key
        self.narrow = getattr(parts.attention, "narrow_values", False)
        queries = decoder.heads * decoder.head_width
        self.sizes = [self.latent.q_rank or queries, self.latent.kv_rank, self.latent.rotary_width]
        self.qkv = nn.Linear(decoder.width, sum(self.sizes), bias=False)
        if self.latent.q_rank is not None:
            self.q_norm = parts.operators.norm(self.latent.q_rank, "rms", self.latent.eps)
            self.q_up = nn.Linear(self.latent.q_rank, queries, bias=False)
        self.kv_norm = parts.operators.norm(self.latent.kv_rank, "rms", self.latent.eps)
        self.kv_up = nn.Linear(self.latent.kv_rank, decoder.heads * (self.cut[0] + self.latent.value_width), bias=False)
        self.out = nn.Linear(decoder.heads * self.latent.value_width, decoder.width, bias=False)

    def forward(self, x: Tensor, rotation: Tensor, plan: Any) -> Tensor:
        q, kv, turned_key = project(x, self.qkv, self.sizes, self.decoder.fused_qkv)
        if self.latent.q_rank is not None:
            q = self.q_up(self.q_norm(q))
        plain, turned = self._heads(q).split(self.cut, dim=-1)
        plain_key, v = self._heads(self.kv_up(self.kv_norm(kv))).split([self.cut[0], self.latent.value_width], dim=-1)
        q = torch.cat([plain, rotate(turned, rotation, self.interleaved)], dim=-1)
        if self.of_scores != 1:
            q = q * self.of_scores
        turned_key = rotate(turned_key.unsqueeze(1), rotation, self.interleaved)
        k = torch.cat([plain_key, turned_key.expand(-1, self.decoder.heads, -1, -1)], dim=-1)
        heads = self._attend(q, k, v, plan)
        return self.out(heads.transpose(1, 2).flatten(2))       # type: ignore[no-any-return]

    def _heads(self, rows: Tensor) -> Tensor:
        """[B, T, heads * n] -> [B, heads, T, n]"""
        return rows.unflatten(-1, (self.decoder.heads, -1)).transpose(1, 2)     # type: ignore[no-any-return]

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, plan: Any) -> Tensor:
        """Values as wide as keys, with zeros, for an option whose kernels know one width only."""
        dropout = self.decoder.dropout if self.training else 0.0
        if self.narrow:
            return self.attend(q, k, v, plan, dropout)
        padded = F.pad(v, (0, self.decoder.head_width - self.latent.value_width))
        heads: Tensor = self.attend(q, k, padded, plan, dropout)
        return heads[..., : self.latent.value_width]
