"""What each family's config.json calls the settings of the decoder, and back.

`fields` reads, `settings` writes; what is lost between the two is found by forge.model.huggingface, which compares.
"""

from __future__ import annotations

from typing import Any

from forge.errors import ConfigError, UnreadableError
from forge.model.decoder import Decoder, Family
from forge.model.rotary_families import rotary_fields, rotary_settings
from forge.moe_router import Routing

Settings = dict[str, Any]

# What only training does to a routing, and no config.json says: off, until the run says otherwise.
TRAINING: Settings = {
    "jitter": 0.0, "aux_scope": "batch", "z_loss": 0.0, "balance": "none", "bias_rate": 0.001, "threshold": 2.0,
    "load_decay": 0.9, "balance_from": 0, "balance_ramp": 100, "capacity_factor": None}

GELUS = {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu"}
LATENT_EPS = 1e-6       # of the norms of latents, which no config.json states: rms_norm_eps is that of all other norms
DENSE = ("llama", "qwen2", "qwen3")
DEEPSEEK = ("dots1", "deepseek_v3")     # a token's experts by sigmoid scores, bias and groups; the first blocks dense


def fields(settings: Settings) -> Settings:
    """The decoder's fields. Raises KeyError for what is not stated, UnreadableError for what is not computed."""
    family: Family = settings["model_type"]
    return _gpt2_fields(settings) if family == "gpt2" else _llama_fields(settings, family)


def settings(decoder: Decoder) -> Settings:
    """A config.json, as far as the family has places. Raises ConfigError where it has none at all."""
    return _gpt2_settings(decoder) if decoder.family == "gpt2" else _llama_settings(decoder)


def _gpt2_fields(settings: Settings) -> Settings:
    width, heads = settings["n_embd"], settings["n_head"]
    name = settings.get("activation_function", "gelu_new")
    return {
        "vocab_size": settings["vocab_size"], "width": width, "layers": settings["n_layer"], "heads": heads,
        "kv_heads": heads, "head_width": width // heads, "hidden": settings.get("n_inner") or 4 * width,
        "norm": "layer", "eps": settings["layer_norm_epsilon"], "rotary": None, "max_length": settings["n_positions"],
        "activation": GELUS.get(name, name), "biases": True, "qk_norm": "none", "clip_qkv": None, "window": None,
        "latent": None, "tied": settings.get("tie_word_embeddings", True), "dropout": settings.get("resid_pdrop", 0.0),
        "init_std": settings.get("initializer_range", 0.02), "routing": None, "dense_first": None}


def _gpt2_settings(decoder: Decoder) -> Settings:
    if decoder.activation not in GELUS.values():
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
    biases = settings.get("attention_bias", False) if family != "qwen2" else "qkv"
    if family == "llama" and settings.get("mlp_bias", False) != biases:
        raise UnreadableError("Biases in attention and not in the feed-forward, or the other way, are not computed.")
    if family == "qwen3" and biases:
        raise UnreadableError("Biases in attention and not in the feed-forward are not computed.")
    narrow = family in ("qwen3_moe", *DEEPSEEK)        # whose experts have a width of their own
    return {
        "vocab_size": settings["vocab_size"], "width": width, "layers": settings["num_hidden_layers"], "heads": heads,
        "kv_heads": settings.get("num_key_value_heads") or heads,
        "head_width": settings.get("head_dim") or width // heads,
        "hidden": settings["moe_intermediate_size" if narrow else "intermediate_size"],
        "norm": "rms", "eps": settings["rms_norm_eps"], "rotary": rotary_fields(settings),
        "max_length": settings["max_position_embeddings"], "activation": "swiglu", "biases": biases,
        "qk_norm": {"olmoe": "width", "qwen3": "head", "qwen3_moe": "head", "dots1": "head"}.get(family, "none"),
        "clip_qkv": settings.get("clip_qkv") if family == "olmoe" else None,
        "window": settings.get("sliding_window") if family == "mixtral" else None, "latent": None,
        "tied": settings.get("tie_word_embeddings", False), "dropout": settings.get("attention_dropout", 0.0),
        "init_std": settings.get("initializer_range", 0.02), "routing": _routing_fields(settings, family),
        "dense_first": _dense_first_fields(settings) if family in DEEPSEEK else None,
        **(_latent_fields(settings) if family == "deepseek_v3" else {})}


def _llama_settings(decoder: Decoder) -> Settings:
    assert decoder.family != "gpt2"
    settings: Settings = {
        "vocab_size": decoder.vocab_size, "hidden_size": decoder.width, "num_hidden_layers": decoder.layers,
        "num_attention_heads": decoder.heads, "num_key_value_heads": decoder.kv_heads,
        "head_dim": decoder.head_width, "intermediate_size": decoder.hidden, "hidden_act": "silu",
        "rms_norm_eps": decoder.eps, "max_position_embeddings": decoder.max_length,
        "tie_word_embeddings": decoder.tied, "initializer_range": decoder.init_std,
        "attention_dropout": decoder.dropout, **rotary_settings(decoder.rotary)}
    if decoder.family != "mixtral":
        settings["attention_bias"] = decoder.biases is True and decoder.family not in DEEPSEEK
    if decoder.family == "llama":
        return settings | {"mlp_bias": decoder.biases is True}
    if decoder.family in DENSE:
        return settings | {"attention_bias": False}
    if decoder.routing is None:
        raise ConfigError(f"The layout model.family={decoder.family} has no place for model.routing=null.")
    if decoder.family in DEEPSEEK:
        settings |= _deepseek_settings(decoder, decoder.routing)
        return settings if decoder.family == "dots1" else settings | _latent_settings(decoder)
    own: dict[Family, Settings] = {
        "mixtral": {"sliding_window": decoder.window}, "olmoe": {"clip_qkv": decoder.clip_qkv},
        "qwen3_moe": {"moe_intermediate_size": decoder.hidden}}
    return settings | own[decoder.family] | _routing_settings(decoder.routing, decoder.family, decoder.layers)


def _routing_fields(settings: Settings, family: Family) -> Settings | None:
    if family in DENSE:
        return None
    if family in DEEPSEEK:
        return _deepseek_routing_fields(settings)
    count = settings.get("num_local_experts") or settings.get("num_experts")
    if count is None:
        raise KeyError("num_local_experts" if family == "mixtral" else "num_experts")
    return {"num_experts": count, "top_k": settings["num_experts_per_tok"], "score": "softmax",
            "normalize": family == "mixtral" or settings.get("norm_topk_prob", False),
            "scale": 1.0, "num_groups": 1, "top_groups": 1, "shared_hidden": 0,
            # Theirs is one loss over the tokens of all layers, ours a sum over layers: equal where layers are alike.
            "aux_loss": settings.get("router_aux_loss_coef", 0.0) / settings["num_hidden_layers"], **TRAINING}


def _routing_settings(routing: Routing, family: Family, layers: int) -> Settings:
    settings: Settings = {"num_experts_per_tok": routing.top_k, "router_aux_loss_coef": routing.aux_loss * layers}
    if family == "mixtral":
        return settings | {"num_local_experts": routing.num_experts}
    return settings | {"num_experts": routing.num_experts, "norm_topk_prob": routing.normalize}


def _deepseek_routing_fields(settings: Settings) -> Settings:
    # aux_loss_alpha is not read: DeepSeek's loss is Switch's divided by top_k, and the bias balances the load.
    return {"num_experts": settings["n_routed_experts"], "top_k": settings["num_experts_per_tok"], "score": "sigmoid",
            "normalize": settings["norm_topk_prob"], "scale": settings["routed_scaling_factor"],
            "num_groups": settings["n_group"] or 1, "top_groups": settings["topk_group"] or 1,
            "shared_hidden": (settings["n_shared_experts"] or 0) * settings["moe_intermediate_size"],
            "aux_loss": 0.0, **TRAINING}


def _dense_first_fields(settings: Settings) -> Settings | None:
    layers = settings["first_k_dense_replace"]
    return {"layers": layers, "hidden": settings["intermediate_size"]} if layers else None


def _deepseek_settings(decoder: Decoder, routing: Routing) -> Settings:
    first = decoder.dense_first
    return {
        "first_k_dense_replace": decoder.dense_layers, "moe_layer_freq": 1,
        "intermediate_size": decoder.hidden if first is None else first.hidden,
        "moe_intermediate_size": decoder.hidden, "n_shared_experts": routing.shared_hidden // decoder.hidden,
        "n_routed_experts": routing.num_experts, "num_experts_per_tok": routing.top_k, "n_group": routing.num_groups,
        "topk_group": routing.top_groups, "norm_topk_prob": routing.normalize, "routed_scaling_factor": routing.scale,
        "topk_method": "noaux_tc", "scoring_func": "noaux_tc" if decoder.family == "dots1" else "sigmoid",
        "sliding_window": None}


def _latent_fields(settings: Settings) -> Settings:
    turned = settings["qk_rope_head_dim"]
    return {"head_width": settings["qk_nope_head_dim"] + turned, "latent": {
        "q_rank": settings["q_lora_rank"], "kv_rank": settings["kv_lora_rank"], "rotary_width": turned,
        "value_width": settings["v_head_dim"], "eps": LATENT_EPS}}


def _latent_settings(decoder: Decoder) -> Settings:
    if decoder.latent is None or decoder.rotary is None:
        raise ConfigError("The layout model.family=deepseek_v3 has no place for model.latent=null.")
    latent, turned = decoder.latent, decoder.latent.rotary_width
    return {"head_dim": turned, "qk_nope_head_dim": decoder.head_width - turned, "qk_rope_head_dim": turned,
            "v_head_dim": latent.value_width, "q_lora_rank": latent.q_rank, "kv_lora_rank": latent.kv_rank,
            "rope_interleave": decoder.rotary.interleaved, "num_nextn_predict_layers": 0}
