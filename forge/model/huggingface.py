"""Hugging Face's config.json: what it says about a decoder, and the one that says it.

Rotary settings are read in the form of transformers 5 (rope_parameters) and of the released checkpoints (rope_theta,
rope_scaling), and written in the latter, which both understand.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

from forge.errors import ConfigError, UnreadableError
from forge.model.decoder import Decoder, Family, Rotary
from forge.moe_router import Routing
from forge.schema import structure

Settings = dict[str, Any]

ARCHITECTURES: dict[Family, str] = {
    "gpt2": "GPT2LMHeadModel", "llama": "LlamaForCausalLM", "mixtral": "MixtralForCausalLM",
    "olmoe": "OlmoeForCausalLM", "qwen3_moe": "Qwen3MoeForCausalLM"}
_GELUS = {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu"}

# What only training does to a routing, and no config.json says: off, until the run says otherwise.
_TRAINING: Settings = {
    "jitter": 0.0, "aux_scope": "batch", "z_loss": 0.0, "balance": "none", "bias_rate": 0.001, "threshold": 2.0,
    "load_decay": 0.9, "balance_from": 0, "balance_ramp": 100, "capacity_factor": None}

# Settings that change no result of the model that was saved: they belong to the run.
_FREE = {"dropout", "init_std", "weights", "family", "fused_qkv", "aux_loss", *_TRAINING}

# What this decoder computes in one way only. Absent means the same in every release of transformers.
_FIXED: Settings = {
    "hidden_act": "silu", "partial_rotary_factor": 1.0, "decoder_sparse_step": 1, "mlp_only_layers": [],
    "use_sliding_window": False, "scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False,
    "add_cross_attention": False, "quantization_config": None}


def read_config(folder: Path) -> Settings:
    """The folder's config.json. Raises UnreadableError."""
    path = folder / "config.json"
    try:
        settings = json.loads(path.read_text())
    except FileNotFoundError:
        raise UnreadableError(f"{folder} is not a Hugging Face folder: it has no config.json.") from None
    except (OSError, ValueError) as error:
        raise UnreadableError(f"{path} cannot be read: {error}.") from None
    if not isinstance(settings, dict) or settings.get("model_type") not in get_args(Family):
        found = settings.get("model_type") if isinstance(settings, dict) else settings
        raise UnreadableError(f"{path} describes model_type={found!r}; known are {', '.join(get_args(Family))}.")
    return settings


def decoder_of(settings: Settings, where: str) -> Decoder:
    """The decoder that a config.json describes. Raises UnreadableError, naming `where`, where there is none."""
    family = settings["model_type"]
    mistakes = [f"{key}={settings[key]!r}" for key, only in _FIXED.items()
                if settings.get(key) is not None and settings[key] != only]
    if mistakes:
        raise UnreadableError(f"{where} describes what this decoder does not compute: {', '.join(mistakes)}.")
    try:
        fields = _gpt2_fields(settings) if family == "gpt2" else _llama_fields(settings, family)
    except KeyError as error:
        raise UnreadableError(f"{where} does not state {error.args[0]}.") from None
    except (TypeError, AttributeError, ZeroDivisionError) as error:
        raise UnreadableError(f"{where} does not fit: {error}.") from None
    decoder: Decoder | None = structure(Decoder, {**fields, "fused_qkv": True, "family": family, "weights": None},
                                            where, mistakes)
    if decoder is None:
        raise UnreadableError(f"{where} does not fit: {' '.join(mistakes)}")
    return decoder


def settings_of(decoder: Decoder) -> Settings:
    """A config.json for transformers' AutoModelForCausalLM. Raises ConfigError where the family has no place for a
    setting of this decoder."""
    settings = _gpt2_settings(decoder) if decoder.family == "gpt2" else _llama_settings(decoder)
    settings = {"model_type": decoder.family, "architectures": [ARCHITECTURES[decoder.family]], **settings}
    lost = differences(decoder, decoder_of(settings, decoder.family))
    if lost:
        raise ConfigError(f"The layout model.family={decoder.family} has no place for "
                          f"{', '.join(f'{name}={ours!r}' for name, ours, _ in lost)}.")
    return settings


def disagreements(decoder: Decoder, folder: Path) -> Iterator[str]:
    """What the decoder and the folder say differently, so that its weights would give other results than they did."""
    other = decoder_of(read_config(folder), f"{folder}/config.json")
    if other.family != decoder.family:
        yield f"{folder} holds weights of family {other.family}, and model.family={decoder.family}."
        return
    for name, ours, theirs in differences(decoder, other):
        yield f"{name}={_shown(ours)}, but the weights in {folder} were trained with {_shown(theirs)}: make it so."


def differences(one: Decoder, other: Decoder) -> list[tuple[str, Any, Any]]:
    """(dotted name, value in one, value in other) of each setting that changes results."""
    a, b = _flat(one), _flat(other)
    return [(name, a.get(name), b.get(name)) for name in sorted(a.keys() | b.keys()) if a.get(name) != b.get(name)]


def _flat(decoder: Decoder) -> Settings:
    found: Settings = {}

    def visit(value: Any, name: str) -> None:
        if not dataclasses.is_dataclass(value):
            found[name] = value
            return
        for field in dataclasses.fields(value):
            if field.name not in _FREE:
                visit(getattr(value, field.name), f"{name}.{field.name}")

    visit(decoder, "model")
    if decoder.rotary is not None:
        del found["model.max_length"]       # written down only
    if found.get("model.routing.score") == "softmax_of_chosen":
        # The same weights: what all probabilities have in common cancels. Families that state no score (Mixtral's
        # formula is the one, transformers computes the other) are read as the second, as forge has always written them.
        found |= {"model.routing.score": "softmax", "model.routing.normalize": True}
    return found


def _shown(value: Any) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _gpt2_fields(settings: Settings) -> Settings:
    width, heads = settings["n_embd"], settings["n_head"]
    name = settings.get("activation_function", "gelu_new")
    return {
        "vocab_size": settings["vocab_size"], "width": width, "layers": settings["n_layer"], "heads": heads,
        "kv_heads": heads, "head_width": width // heads, "hidden": settings.get("n_inner") or 4 * width,
        "norm": "layer", "eps": settings["layer_norm_epsilon"], "rotary": None, "max_length": settings["n_positions"],
        "activation": _GELUS.get(name, name), "biases": True, "qk_norm": "none", "clip_qkv": None, "window": None,
        "tied": settings.get("tie_word_embeddings", True), "dropout": settings.get("resid_pdrop", 0.0),
        "init_std": settings.get("initializer_range", 0.02), "routing": None}


def _gpt2_settings(decoder: Decoder) -> Settings:
    if decoder.activation not in _GELUS.values():
        raise ConfigError(f"The layout model.family=gpt2 has no place for model.activation={decoder.activation}.")
    return {
        "vocab_size": decoder.vocab_size, "n_embd": decoder.width, "n_layer": decoder.layers,
        "n_head": decoder.heads, "n_inner": decoder.hidden, "n_positions": decoder.max_length,
        "activation_function": "gelu_new" if decoder.activation == "gelu_tanh" else decoder.activation,
        "layer_norm_epsilon": decoder.eps, "tie_word_embeddings": decoder.tied,
        "initializer_range": decoder.init_std,
        **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), decoder.dropout)}


def _llama_fields(settings: Settings, family: Family) -> Settings:
    width, heads = settings["hidden_size"], settings["num_attention_heads"]
    biases = settings.get("attention_bias", False)
    if family == "llama" and settings.get("mlp_bias", False) != biases:
        raise UnreadableError("Biases in attention and not in the feed-forward, or the other way, are not computed.")
    return {
        "vocab_size": settings["vocab_size"], "width": width, "layers": settings["num_hidden_layers"], "heads": heads,
        "kv_heads": settings.get("num_key_value_heads") or heads,
        "head_width": settings.get("head_dim") or width // heads,
        "hidden": settings["moe_intermediate_size" if family == "qwen3_moe" else "intermediate_size"],
        "norm": "rms", "eps": settings["rms_norm_eps"], "rotary": _rotary_fields(settings),
        "max_length": settings["max_position_embeddings"], "activation": "swiglu", "biases": biases,
        "qk_norm": {"olmoe": "width", "qwen3_moe": "head"}.get(family, "none"),
        "clip_qkv": settings.get("clip_qkv") if family == "olmoe" else None,
        "window": settings.get("sliding_window") if family == "mixtral" else None,
        "tied": settings.get("tie_word_embeddings", False), "dropout": settings.get("attention_dropout", 0.0),
        "init_std": settings.get("initializer_range", 0.02), "routing": _routing_fields(settings, family)}


def _llama_settings(decoder: Decoder) -> Settings:
    assert decoder.family != "gpt2"
    settings: Settings = {
        "vocab_size": decoder.vocab_size, "hidden_size": decoder.width, "num_hidden_layers": decoder.layers,
        "num_attention_heads": decoder.heads, "num_key_value_heads": decoder.kv_heads,
        "head_dim": decoder.head_width, "intermediate_size": decoder.hidden, "hidden_act": "silu",
        "rms_norm_eps": decoder.eps, "max_position_embeddings": decoder.max_length,
        "tie_word_embeddings": decoder.tied, "initializer_range": decoder.init_std,
        "attention_dropout": decoder.dropout, **_rotary_settings(decoder.rotary)}
    if decoder.family != "mixtral":
        settings["attention_bias"] = decoder.biases
    if decoder.family == "llama":
        return settings | {"mlp_bias": decoder.biases}
    if decoder.routing is None:
        raise ConfigError(f"The layout model.family={decoder.family} has no place for model.routing=null.")
    own: dict[Family, Settings] = {
        "mixtral": {"sliding_window": decoder.window}, "olmoe": {"clip_qkv": decoder.clip_qkv},
        "qwen3_moe": {"moe_intermediate_size": decoder.hidden}}
    return settings | own[decoder.family] | _routing_settings(decoder.routing, decoder.family)


def _rotary_fields(settings: Settings) -> Settings:
    stated: Settings = settings.get("rope_parameters") or settings.get("rope_scaling") or {}
    usual = 1e6 if settings["model_type"] == "mixtral" else 1e4
    base = stated.get("rope_theta", settings.get("rope_theta", usual))
    kind = stated.get("rope_type", stated.get("type", "default"))
    if kind not in ("default", "llama3") or stated.get("partial_rotary_factor", 1.0) != 1.0:
        raise UnreadableError(f"Rotary positions scaled by {stated} are not computed; known are default and llama3.")
    scaling = None if kind == "default" else {
        "factor": stated["factor"], "low_freq_factor": stated["low_freq_factor"],
        "high_freq_factor": stated["high_freq_factor"],
        "original_max_length": stated["original_max_position_embeddings"]}
    return {"base": base, "scaling": scaling}


def _rotary_settings(rotary: Rotary | None) -> Settings:
    if rotary is None:
        raise ConfigError("This model.family has no place for learned positions (model.rotary=null).")
    if rotary.scaling is None:
        return {"rope_theta": rotary.base, "rope_scaling": None}
    return {"rope_theta": rotary.base, "rope_scaling": {
        "rope_type": "llama3", "factor": rotary.scaling.factor, "low_freq_factor": rotary.scaling.low_freq_factor,
        "high_freq_factor": rotary.scaling.high_freq_factor,
        "original_max_position_embeddings": rotary.scaling.original_max_length}}


def _routing_fields(settings: Settings, family: Family) -> Settings | None:
    if family == "llama":
        return None
    count = settings.get("num_local_experts") or settings.get("num_experts")
    if count is None:
        raise KeyError("num_local_experts" if family == "mixtral" else "num_experts")
    return {"num_experts": count, "top_k": settings["num_experts_per_tok"], "score": "softmax",
            "normalize": family == "mixtral" or settings.get("norm_topk_prob", False),
            "scale": 1.0, "groups": 1, "top_groups": 1, "shared_hidden": 0,
            "aux_loss": settings.get("router_aux_loss_coef", 0.0), **_TRAINING}


def _routing_settings(routing: Routing, family: Family) -> Settings:
    settings: Settings = {"num_experts_per_tok": routing.top_k, "router_aux_loss_coef": routing.aux_loss}
    if family == "mixtral":
        return settings | {"num_local_experts": routing.num_experts}
    return settings | {"num_experts": routing.num_experts, "norm_topk_prob": routing.normalize}
