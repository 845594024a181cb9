"""One block of the decoder."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from forge.model import Parts
from forge.model.decoder import Decoder
from forge.model.latent import LatentAttention
from forge.model.self_attention import SelfAttention


class Block(nn.Module):
    """Attention and feed-forward, each normalised before and added after."""

    def __init__(self, decoder: Decoder, parts: Parts, layer: int) -> None:
        super().__init__()
        self.dropout = decoder.dropout
        self.routed = layer >= decoder.dense_layers
        self.num_experts = 0 if decoder.routing is None else decoder.routing.num_experts
        self.attention_norm = parts.operators.norm(decoder.width, decoder.norm, decoder.eps)
        self.attention = (SelfAttention if decoder.latent is None else LatentAttention)(decoder, parts)
        self.feed_forward_norm = parts.operators.norm(decoder.width, decoder.norm, decoder.eps)
        self.feed_forward = _feed_forward(decoder, parts, self.routed)

    def forward(self, x: Tensor, aux: Tensor, rotation: Tensor | None, valid: Tensor | None,
                plan: Any) -> tuple[Tensor, Tensor, Tensor]:
        """x: [B, T, width]. aux: scalar float32, the auxiliary losses of the blocks before.

        Returns (x, aux, load [2 or 3, num_experts], of a dense block among routed ones zeros [num_experts], in a dense
        model empty). What a block learns about its load it returns, and stores nowhere: so it survives checkpointing,
        which runs forward twice, and compilation.
        """
        x = self._add(x, self.attention(self.attention_norm(x), rotation, plan))
        normed = self.feed_forward_norm(x)
        if not self.routed:
            return self._add(x, self.feed_forward(normed)), aux, aux.new_zeros(self.num_experts)
        y, own_aux, load = self.feed_forward(normed, valid)
        return self._add(x, y), aux + own_aux, load

    def _add(self, x: Tensor, branch: Tensor) -> Tensor:
        """The hidden stream keeps its dtype, whichever dtype the branch was computed in."""
        return x + F.dropout(branch, self.dropout, self.training).to(x.dtype)


def _feed_forward(decoder: Decoder, parts: Parts, routed: bool) -> nn.Module:
    if routed:
        assert decoder.routing is not None
        return parts.moe_router.build(decoder.width, decoder.hidden, decoder.routing)
    hidden = decoder.hidden if decoder.dense_first is None else decoder.dense_first.hidden
    return parts.operators.feed_forward(decoder.width, hidden, decoder.activation, decoder.biases is True)
