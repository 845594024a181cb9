"""Under which names, and how cut, a family's checkpoints hold what a decoder has learnt.

Every parameter has a rule that names tensors on disk. Rules say which axis is cut or joined, and nothing is ever
guessed from a shape.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from forge.model.decoder import Decoder
from forge.model.families import DEEPSEEK
from forge.model.vlm import VLM

Shape = tuple[int, ...]
HEAD = "lm_head.weight"
BIAS = "bias"       # of a mixture: what only the choice of experts sees


class Rule(Protocol):
    """How one parameter of a known shape stands on disk."""

    def shapes(self, shape: Shape) -> dict[str, Shape]: ...
    def read(self, tensor: Callable[[str], Tensor]) -> Tensor: ...
    def write(self, parameter: Tensor) -> dict[str, Tensor]: ...


@dataclass(frozen=True)
class Same:
    name: str

    def shapes(self, shape: Shape) -> dict[str, Shape]:
        return {self.name: shape}

    def read(self, tensor: Callable[[str], Tensor]) -> Tensor:
        return tensor(self.name)

    def write(self, parameter: Tensor) -> dict[str, Tensor]:
        return {self.name: parameter}


@dataclass(frozen=True)
class Transposed:
    """[out, in] here, [in, out] on disk: GPT-2's Conv1D."""

    name: str

    def shapes(self, shape: Shape) -> dict[str, Shape]:
        return {self.name: (shape[1], shape[0])}

    def read(self, tensor: Callable[[str], Tensor]) -> Tensor:
        return tensor(self.name).T

    def write(self, parameter: Tensor) -> dict[str, Tensor]:
        return {self.name: parameter.T}


@dataclass(frozen=True)
class Rows:
    """One tensor here, several on disk, stacked along axis 0. rows: of each."""

    names: tuple[str, ...]
    rows: tuple[int, ...]

    def shapes(self, shape: Shape) -> dict[str, Shape]:
        return {name: (rows, *shape[1:]) for name, rows in zip(self.names, self.rows, strict=True)}

    def read(self, tensor: Callable[[str], Tensor]) -> Tensor:
        return torch.cat([tensor(name) for name in self.names])

    def write(self, parameter: Tensor) -> dict[str, Tensor]:
        return dict(zip(self.names, torch.split(parameter, list(self.rows)), strict=True))


@dataclass(frozen=True)
class Experts:
    """[num_experts, ...] here, each expert by its own rule on disk."""

    each: tuple[Rule, ...]

    def shapes(self, shape: Shape) -> dict[str, Shape]:
        return {name: found for rule in self.each for name, found in rule.shapes(shape[1:]).items()}

    def read(self, tensor: Callable[[str], Tensor]) -> Tensor:
        return torch.stack([rule.read(tensor) for rule in self.each])

    def write(self, parameter: Tensor) -> dict[str, Tensor]:
        return {name: found for rule, one in zip(self.each, parameter.unbind(), strict=True)
                for name, found in rule.write(one).items()}


@dataclass(frozen=True)
class Layout:
    """rules: one for each parameter, and for each selection bias of experts where the family has them.
    surplus: names on disk that carry no weights, and may be there. head: the name of the head on disk, which a tied
    model's folder may hold too. idle: tensors that the family has, and computes nothing with."""

    rules: dict[str, Rule]
    surplus: re.Pattern[str]
    head: str
    idle: dict[str, Shape] = field(default_factory=dict)


def layouts(decoder: Decoder) -> list[Layout]:
    """The layouts a folder of this family may have, the one we write first."""
    if isinstance(decoder, VLM):
        from forge.model import vision_layouts

        return vision_layouts.layouts(decoder)
    return of_text(decoder, "model.", HEAD)


def of_text(decoder: Decoder, prefix: str, head: str) -> list[Layout]:
    """Those of a decoder whose tensors' names begin with `prefix`."""
    if decoder.family == "gpt2":        # with the prefix as GPT2LMHeadModel saves, without as the released files
        return [_gpt2(decoder, "transformer."), _gpt2(decoder, "")]
    if decoder.routing is None:
        return [_llama(decoder, _dense, prefix, head)]
    return [_llama(decoder, experts, prefix, head) for experts in (_released_experts, _fused_experts)]


FeedForward = Callable[[Decoder, str], dict[str, Rule]]     # prefix of a layer on disk -> rules of its feed-forward


def _gpt2(decoder: Decoder, prefix: str) -> Layout:
    rules: dict[str, Rule] = {
        "embedding.weight": Same(f"{prefix}wte.weight"), "position_embedding.weight": Same(f"{prefix}wpe.weight")}
    for layer in range(decoder.layers):
        here, there = f"blocks.{layer}.", f"{prefix}h.{layer}."
        for ours, theirs in (("attention.qkv", "attn.c_attn"), ("attention.out", "attn.c_proj"),
                             ("feed_forward.up", "mlp.c_fc"), ("feed_forward.down", "mlp.c_proj")):
            rules[f"{here}{ours}.weight"] = Transposed(f"{there}{theirs}.weight")
            rules[f"{here}{ours}.bias"] = Same(f"{there}{theirs}.bias")
        for ours, theirs in (("attention_norm", "ln_1"), ("feed_forward_norm", "ln_2")):
            rules |= {f"{here}{ours}.{kind}": Same(f"{there}{theirs}.{kind}") for kind in ("weight", "bias")}
    rules |= {f"final_norm.{kind}": Same(f"{prefix}ln_f.{kind}") for kind in ("weight", "bias")}
    # The released files hold each layer's causal mask as attn.bias.
    return Layout(rules | _head(decoder, HEAD), re.compile(r".*\.attn\.(masked_)?bias"), HEAD)


def _llama(decoder: Decoder, feed_forward: FeedForward, prefix: str, head: str) -> Layout:
    rules: dict[str, Rule] = {"embedding.weight": Same(f"{prefix}embed_tokens.weight")}
    for layer in range(decoder.layers):
        here, there = f"blocks.{layer}.", f"{prefix}layers.{layer}."
        found = (_norms(there) | (_attention if decoder.latent is None else _latent_attention)(decoder, there)
                 | (_dense if layer < decoder.dense_layers else feed_forward)(decoder, there))
        rules |= {f"{here}{name}": rule for name, rule in found.items()}
    rules["final_norm.weight"] = Same(f"{prefix}norm.weight")
    return Layout(rules | _head(decoder, head), re.compile(r".*\.rotary_emb\.inv_freq"), head)


def _head(decoder: Decoder, head: str) -> dict[str, Rule]:
    return {} if decoder.tied else {"head.weight": Same(head)}


def _norms(there: str) -> dict[str, Rule]:
    return {"attention_norm.weight": Same(f"{there}input_layernorm.weight"),
            "feed_forward_norm.weight": Same(f"{there}post_attention_layernorm.weight")}


def _attention(decoder: Decoder, there: str) -> dict[str, Rule]:
    queries, keys = decoder.heads * decoder.head_width, decoder.kv_heads * decoder.head_width
    rules: dict[str, Rule] = {}
    for kind in _kinds(decoder.biases is not False):
        names = tuple(f"{there}self_attn.{letter}_proj.{kind}" for letter in "qkv")
        rules[f"attention.qkv.{kind}"] = Rows(names, (queries, keys, keys))
    for kind in _kinds(decoder.biases is True):
        rules[f"attention.out.{kind}"] = Same(f"{there}self_attn.o_proj.{kind}")
    if decoder.qk_norm != "none":
        rules |= {f"attention.{norm}.weight": Same(f"{there}self_attn.{norm}.weight") for norm in ("q_norm", "k_norm")}
    return rules


def _kinds(biased: bool) -> tuple[str, ...]:
    return ("weight", "bias") if biased else ("weight",)


def _latent_attention(decoder: Decoder, there: str) -> dict[str, Rule]:
    assert decoder.latent is not None
    latent, attention = decoder.latent, f"{there}self_attn."
    queries, first = ((decoder.heads * decoder.head_width, "q_proj") if latent.q_rank is None
                      else (latent.q_rank, "q_a_proj"))
    rules: dict[str, Rule] = {
        "attention.qkv.weight": Rows((f"{attention}{first}.weight", f"{attention}kv_a_proj_with_mqa.weight"),
                                     (queries, latent.kv_rank + latent.rotary_width)),
        "attention.kv_norm.weight": Same(f"{attention}kv_a_layernorm.weight"),
        "attention.kv_up.weight": Same(f"{attention}kv_b_proj.weight"),
        "attention.out.weight": Same(f"{attention}o_proj.weight")}
    if latent.q_rank is not None:
        rules |= {"attention.q_norm.weight": Same(f"{attention}q_a_layernorm.weight"),
                  "attention.q_up.weight": Same(f"{attention}q_b_proj.weight")}
    return rules


def _dense(decoder: Decoder, there: str) -> dict[str, Rule]:
    hidden = decoder.hidden if decoder.dense_first is None else decoder.dense_first.hidden
    rules: dict[str, Rule] = {}
    for kind in _kinds(decoder.biases is True):
        rules[f"feed_forward.up.{kind}"] = _gate_and_up(f"{there}mlp.", kind, hidden)
        rules[f"feed_forward.down.{kind}"] = Same(f"{there}mlp.down_proj.{kind}")
    return rules


def _gate_and_up(there: str, kind: str, hidden: int) -> Rule:
    return Rows((f"{there}gate_proj.{kind}", f"{there}up_proj.{kind}"), (hidden, hidden))


def _released_experts(decoder: Decoder, there: str) -> dict[str, Rule]:
    """One tensor an expert, as the released files."""
    assert decoder.routing is not None
    rows = (decoder.hidden, decoder.hidden)
    mixture, gate, up, down = (("block_sparse_moe", "w1", "w3", "w2") if decoder.family == "mixtral"
                               else ("mlp", "gate_proj", "up_proj", "down_proj"))
    experts = [f"{there}{mixture}.experts.{expert}." for expert in range(decoder.routing.num_experts)]
    return {"feed_forward.gate.weight": Same(f"{there}{mixture}.gate.weight"),
            "feed_forward.gate_up": Experts(tuple(
                Rows((f"{expert}{gate}.weight", f"{expert}{up}.weight"), rows) for expert in experts)),
            "feed_forward.down": Experts(tuple(Same(f"{expert}{down}.weight") for expert in experts)),
            **_beside_experts(decoder, there)}


def _fused_experts(decoder: Decoder, there: str) -> dict[str, Rule]:
    """The parameters of transformers 5 in memory, which some of its releases also wrote to disk."""
    return {"feed_forward.gate.weight": Same(f"{there}mlp.gate.weight"),
            "feed_forward.gate_up": Same(f"{there}mlp.experts.gate_up_proj"),
            "feed_forward.down": Same(f"{there}mlp.experts.down_proj"),
            **_beside_experts(decoder, there)}


def _beside_experts(decoder: Decoder, there: str) -> dict[str, Rule]:
    """The selection bias and the shared expert of DeepSeek's families; others have neither."""
    assert decoder.routing is not None
    rules: dict[str, Rule] = {}
    if decoder.family in DEEPSEEK:
        rules[f"feed_forward.{BIAS}"] = Same(f"{there}mlp.gate.e_score_correction_bias")
    if decoder.routing.shared_hidden:
        shared = f"{there}mlp.shared_experts."
        rules["feed_forward.shared.up.weight"] = _gate_and_up(shared, "weight", decoder.routing.shared_hidden)
        rules["feed_forward.shared.down.weight"] = Same(f"{shared}down_proj.weight")
    return rules
