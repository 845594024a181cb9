"""Hugging Face's config.json: what it says about a decoder, and the one that says it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

from forge.errors import ConfigError, UnreadableError
from forge.model import families, vision_families
from forge.model.decoder import Decoder, Family
from forge.model.families import Settings
from forge.model.vision import VisionFamily
from forge.model.vlm import VLM
from forge.schema import shown, structure

ARCHITECTURES: dict[Family, str] = {
    "gpt2": "GPT2LMHeadModel", "llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM",
    "mixtral": "MixtralForCausalLM", "olmoe": "OlmoeForCausalLM", "qwen3_moe": "Qwen3MoeForCausalLM",
    "dots1": "Dots1ForCausalLM", "deepseek_v3": "DeepseekV3ForCausalLM"}

# Families near those known, and what this decoder does not compute of them.
_NEAR = {"qwen2_moe": "a gate on the shared expert", "deepseek_v2": "groups of experts judged by their best one",
         "glm4_moe": "rotary positions in half of each head", "qwen3_next": "linear attention"}

# Settings that change no result of the model that was saved: they belong to the run.
# (mean and std change results, but stand in no config.json.)
_FREE = {"dropout", "init_std", "weights", "family", "fused_qkv", "aux_loss", "mean", "std", *families.TRAINING}

# What this decoder computes in one way only (a tuple: one way with several names). Absent means the same in every
# release of transformers.
_FIXED: Settings = {
    "hidden_act": "silu", "partial_rotary_factor": 1.0, "decoder_sparse_step": 1, "mlp_only_layers": [],
    "use_sliding_window": False, "scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False,
    "add_cross_attention": False}
_DEEPSEEK_FIXED: Settings = {
    "moe_layer_freq": 1, "topk_method": "noaux_tc", "scoring_func": "sigmoid", "attention_bias": False}
_FIXED_OF: dict[Family, Settings] = {
    "dots1": _DEEPSEEK_FIXED | {"scoring_func": ("noaux_tc", "sigmoid")}, "deepseek_v3": _DEEPSEEK_FIXED}


def read_config(folder: Path) -> Settings:
    """The folder's config.json. Raises UnreadableError."""
    path = folder / "config.json"
    try:
        settings = json.loads(path.read_text())
    except FileNotFoundError:
        raise UnreadableError(f"{folder} is not a Hugging Face folder: it has no config.json.") from None
    except (OSError, ValueError) as error:
        raise UnreadableError(f"{path} cannot be read: {error}.") from None
    known = (*get_args(Family), *get_args(VisionFamily))
    if not isinstance(settings, dict) or settings.get("model_type") not in known:
        found = settings.get("model_type") if isinstance(settings, dict) else settings
        why = f", with {_NEAR[found]}, which this decoder does not compute" if found in [*_NEAR] else ""
        raise UnreadableError(f"{path} describes model_type={found!r}{why}; known are {', '.join(known)}.")
    return settings


def decoder_of(settings: Settings, where: str) -> Decoder:
    """The decoder, or vision-language model, that a config.json describes. Raises UnreadableError, naming `where`,
    where there is none."""
    try:
        text, own = settings, Settings()
        kind: type[Decoder] = Decoder
        if vision_families.is_vision(settings):
            text, own, kind = text_of(settings), vision_families.fields(settings), VLM
        mistakes = list(_not_computed(settings))
        if mistakes:
            raise UnreadableError(f"{where} describes what this decoder does not compute: {', '.join(mistakes)}.")
        fields = {**families.fields(text), **own}
    except KeyError as error:
        raise UnreadableError(f"{where} does not state {error.args[0]}.") from None
    except (TypeError, AttributeError, ZeroDivisionError) as error:
        raise UnreadableError(f"{where} does not fit: {error}.") from None
    fields |= {"fused_qkv": True, "attention_gate": "none", "family": text["model_type"], "weights": None}
    decoder: Decoder | None = structure(kind, fields, where, mistakes)
    if decoder is None:
        raise UnreadableError(f"{where} does not fit: {' '.join(mistakes)}")
    return decoder


def text_of(settings: Settings) -> Settings:
    """What a config.json says of the decoder. Raises KeyError, UnreadableError."""
    if not vision_families.is_vision(settings):
        return settings
    text: Settings = settings["text_config"]
    if text.get("model_type") not in get_args(Family):
        raise UnreadableError(f"Its text_config describes model_type={text.get('model_type')!r}; known are "
                              f"{', '.join(get_args(Family))}.")
    return text


def _not_computed(settings: Settings) -> Iterator[str]:
    if vision_families.is_vision(settings):
        yield from vision_families.not_computed(settings)
        yield from _not_computed(text_of(settings))
        return
    for key, only in (_FIXED | _FIXED_OF.get(settings["model_type"], {})).items():
        if settings.get(key) is not None and settings[key] not in (only if isinstance(only, tuple) else (only,)):
            yield f"{key}={settings[key]!r}"
    quantised = settings.get("quantization_config")
    if quantised is not None:
        kind = quantised.get("quant_method") if isinstance(quantised, dict) else quantised
        yield f"weights in the format {kind!r} (quantization_config); convert them to bfloat16 first"
    if "sliding_attention" in _layer_types(settings):
        yield f"sliding_window={settings['sliding_window']!r} in some layers"


def _layer_types(settings: Settings) -> list[str]:
    """Of Dots1, which states them, or else lets layers from max_window_layers on have windows."""
    if settings["model_type"] != "dots1" or settings.get("sliding_window") is None:
        return []
    stated: list[str] | None = settings.get("layer_types")
    return stated or ["sliding_attention"] * (settings["num_hidden_layers"] - settings["max_window_layers"])


def settings_of(decoder: Decoder) -> Settings:
    """A config.json for transformers' AutoModelForCausalLM, or AutoModelForImageTextToText. Raises ConfigError where
    the family has no place for a setting of this decoder."""
    settings = {"model_type": decoder.family, "architectures": [ARCHITECTURES[decoder.family]],
                **families.settings(decoder)}
    layout = f"model.family={decoder.family}"
    if isinstance(decoder, VLM):
        settings = vision_families.settings(decoder, settings)
        layout = f"model.vision.family={decoder.vision.family}"
    lost = differences(decoder, decoder_of(settings, layout))
    if lost:
        raise ConfigError(f"The layout {layout} has no place for "
                          f"{', '.join(f'{name}={ours!r}' for name, ours, _ in lost)}.")
    return settings


def disagreements(decoder: Decoder, folder: Path) -> Iterator[str]:
    """What the decoder and the folder say differently, so that its weights would give other results than they did."""
    other = decoder_of(read_config(folder), f"{folder}/config.json")
    if type(other) is not type(decoder):
        yield f"{folder} holds weights of {_kind(other)}, and this model is {_kind(decoder)}."
        return
    if other.family != decoder.family:
        yield f"{folder} holds weights of family {other.family}, and model.family={decoder.family}."
        return
    for name, ours, theirs in differences(decoder, other):
        yield f"{name}={shown(ours)}, but the weights in {folder} were trained with {shown(theirs)}: make it so."


def differences(one: Decoder, other: Decoder) -> list[tuple[str, Any, Any]]:
    """(dotted name, value in one, value in other) of each setting that changes results."""
    a, b = _flat(one), _flat(other)
    return [(name, a.get(name), b.get(name)) for name in sorted(a.keys() | b.keys()) if a.get(name) != b.get(name)]


def _kind(decoder: Decoder) -> str:
    return "one that sees pictures" if isinstance(decoder, VLM) else "one of text alone"


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
    if isinstance(decoder, VLM):
        found["model.vision.layer_scale"] = decoder.vision.layer_scale is not None      # where they began is past
    if decoder.rotary is not None:
        del found["model.max_length"]       # written down only
    if found.get("model.routing.score") == "softmax_of_chosen":
        # The same weights: what all probabilities have in common cancels. Families that state no score (Mixtral's
        # formula is the one, transformers computes the other) are read as the second, as forge has always written them.
        found |= {"model.routing.score": "softmax", "model.routing.normalize": True}
    return found


def predictors(settings: Settings) -> int:
    """How many layers after the decoder's own predict further tokens (DeepSeek-V3). They are not computed here, and
    their weights, where a folder has them, are not read."""
    return settings.get("num_nextn_predict_layers") or 0 if settings["model_type"] == "deepseek_v3" else 0
