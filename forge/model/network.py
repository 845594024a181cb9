"""The decoder as a module: see forge.model.Trainable for the contract."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from forge.attention import Layout
from forge.batch import IGNORED, Batch
from forge.decisions import DECISIONS
from forge.errors import ConfigError
from forge.model import Parts
from forge.model.block import Block
from forge.model.decoder import Decoder
from forge.model.flops import Forward, convention, forward_of
from forge.model.rotary import RotaryEmbedding
from forge.moe_router.memory import remember_pass, remember_update, terms_of
from forge.optimizer import Outcome


class Network(nn.Module):
    """Embedding, blocks, norm, head."""

    def __init__(self, decoder: Decoder, parts: Parts) -> None:
        super().__init__()
        self.decoder, self.attention, self.loss = decoder, parts.attention, parts.loss
        self.residual_dtype: torch.dtype | None = None
        self.embedding = nn.Embedding(decoder.vocab_size, decoder.width)
        if decoder.rotary is None:
            self.position_embedding = nn.Embedding(decoder.max_length, decoder.width)
        else:
            self.rotary = RotaryEmbedding(decoder.rotated_width, decoder.rotary)
        self.blocks = nn.ModuleList(Block(decoder, parts, layer) for layer in range(decoder.layers))
        self.final_norm = parts.operators.norm(decoder.width, decoder.norm, decoder.eps)
        if not decoder.tied:
            self.head = nn.Linear(decoder.width, decoder.vocab_size, bias=False)

    def train(self, mode: bool = True) -> Network:
        """What is frozen whole (optimizer.groups) stays in evaluation mode: no dropout is drawn, nothing remembered."""
        super().train(mode)
        for module in self.modules():
            parameters = list(module.parameters())
            if mode and parameters and not any(parameter.requires_grad for parameter in parameters):
                module.eval()
        return self

    def forward(self, batch: Batch, scale: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        positions, plan = self._prepare(batch)
        scaled, loss_sum, aux, load = self.compute(
            batch.tensors["tokens"], batch.tensors["targets"], positions, plan, scale, *self._beside(batch))
        if self.training and self.decoder.routing is not None:
            remember_pass(self._mixtures(), load)
        return scaled, loss_sum, self._terms(aux, load)

    def after_update(self, terms: dict[str, Tensor], outcome: Outcome) -> None:
        if self.decoder.routing is not None:
            remember_update(self.decoder.routing, self._mixtures(), terms, outcome.applied)

    def _mixtures(self) -> list[Any]:
        """One a block; None where it is dense."""
        return [block.feed_forward if block.routed else None for block in self.blocks]

    def compute(self, tokens: Tensor, targets: Tensor, positions: Tensor, plan: Any, scale: Tensor,
                *beside: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(scaled, loss_sum, aux, load): all that can be compiled as one graph.

        beside: what a model that embeds more than tokens takes from the batch. load: [layers, 2 or 3, num_experts], see
        forge.moe_router.MoERouter.
        """
        valid = None if self.decoder.routing is None else targets != IGNORED
        hidden, aux, load = self._hidden(tokens, positions, valid, plan, *beside)
        scaled, loss_sum = self.score(hidden, targets, scale)
        return scaled + aux * scale, loss_sum, aux.detach(), load

    def score(self, hidden: Tensor, targets: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        """(scaled, loss_sum) from what the last block gives: norm, head and loss."""
        return self.loss(self.final_norm(hidden).flatten(0, 1), self._head_weight(), targets.flatten(), scale)

    def hidden_states(self, batch: Batch) -> Tensor:
        positions, plan = self._prepare(batch)
        return self._hidden(batch.tensors["tokens"], positions, None, plan, *self._beside(batch))[0]

    def logits_of(self, hidden: Tensor) -> Tensor:
        return F.linear(self.final_norm(hidden), self._head_weight()).float()

    def logits(self, batch: Batch) -> Tensor:
        return self.logits_of(self.hidden_states(batch))

    def block_lists(self) -> list[nn.ModuleList]:
        return [self.blocks]

    def decisions(self) -> frozenset[Any]:
        return frozenset() if self.decoder.routing is None else frozenset(DECISIONS)

    def flops_per_token(self, sequence_length: int) -> float:
        return convention(self.forward_flops(), sequence_length)

    def forward_flops(self) -> Forward:
        return forward_of(self.decoder)

    def branches(self, name: str) -> int:
        """How many branches add up in the stream that this parameter's branch is added to."""
        return 2 * self.decoder.layers

    def _prepare(self, batch: Batch) -> tuple[Tensor, Any]:
        """Positions [B or 1, T], and the attention option's plan."""
        tokens = batch.tensors["tokens"]
        length = tokens.shape[1]
        if self.decoder.rotary is None and length > self.decoder.max_length:
            raise ConfigError(f"A row of {length} tokens is longer than model.max_length={self.decoder.max_length}, "
                              f"the positions this model has learned.")
        positions = batch.tensors.get("positions")
        if positions is None:
            positions = torch.arange(length, device=tokens.device).unsqueeze(0)
        layout = Layout(causal=True, documents=batch.tensors.get("documents"), window=self.decoder.window,
                        length=length, device=tokens.device)
        return positions, self.attention.plan(layout)

    def _beside(self, batch: Batch) -> tuple[Any, ...]:
        """What `_embedded` takes beside tokens."""
        return ()

    def _embedded(self, tokens: Tensor, *beside: Any) -> Tensor:
        """[B, T, width]"""
        return self.embedding(tokens)       # type: ignore[no-any-return]

    def _hidden(self, tokens: Tensor, positions: Tensor, valid: Tensor | None, plan: Any,
                *beside: Any) -> tuple[Tensor, Tensor, Tensor]:
        """(what the last block gives [B, T, width], aux, load: see compute)"""
        x, rotation = self._embedded(tokens, *beside), None
        if self.decoder.rotary is None:
            x = x + self.position_embedding(positions)
        else:
            rotation = self.rotary(positions)
        x = F.dropout(x, self.decoder.dropout, self.training)
        x = x if self.residual_dtype is None else x.to(self.residual_dtype)
        aux, loads = torch.zeros((), device=x.device), []
        for block in self.blocks:
            x, aux, load = block(x, aux, rotation, valid, plan)
            loads.append(load)
        return x, aux, torch.stack([load.expand_as(loads[-1]) for load in loads])   # the first may be dense

    def _head_weight(self) -> Tensor:
        return self.embedding.weight if self.decoder.tied else self.head.weight

    def _terms(self, aux: Tensor, load: Tensor) -> dict[str, Tensor]:
        routing = self.decoder.routing
        if routing is None:
            return {}
        return terms_of(routing, load) | ({"aux_loss": aux} if routing.aux_loss > 0 or routing.z_loss > 0 else {})


def initialised(decoder: Decoder, parts: Parts, kind: type[Network] = Network) -> Network:
    """A network of this kind with weights drawn from torch's global generator, on the default device."""
    device = torch.get_default_device()
    # What the layers' constructors draw is thrown away, so options that draw differently start from the same weights.
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        network = kind(decoder, parts)
    for name, parameter in network.named_parameters():
        added = name.endswith(("attention.out.weight", "feed_forward.down.weight", "feed_forward.down",
                               "feed_forward.shared.down.weight"))
        if parameter.dim() >= 2:
            branches = network.branches(name) if added else 1
            nn.init.normal_(parameter, std=decoder.init_std / branches**0.5)
        elif name.endswith("bias"):
            nn.init.zeros_(parameter)
    return network
