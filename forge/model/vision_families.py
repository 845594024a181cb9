"""What the config.json of each vision-language family says of tower and projector, and back. Its text_config is that of
the decoder, see forge.model.families."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, get_args

from forge.errors import ConfigError, UnreadableError
from forge.model.families import GELUS, Settings
from forge.model.vision import VisionFamily
from forge.model.vlm import VLM

ARCHITECTURES: dict[VisionFamily, str] = {
    "idefics3": "Idefics3ForConditionalGeneration", "smolvlm": "SmolVLMForConditionalGeneration",
    "llava": "LlavaForConditionalGeneration", "internvl": "InternVLForConditionalGeneration"}
SIGLIP = "siglip_vision_model"
_TOWERS: dict[VisionFamily, str] = {
    "idefics3": "idefics3_vision", "smolvlm": "smolvlm_vision", "llava": SIGLIP, "internvl": "internvl_vision"}
_MEAN = {"internvl": ([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])}        # ImageNet's; SigLIP's are halves

# What is computed in one way only, of the whole and of its tower. Absent means the same.
_FIXED: dict[VisionFamily, Settings] = {
    "idefics3": {}, "smolvlm": {},
    "llava": {"vision_feature_layer": -1, "vision_feature_select_strategy": "full", "projector_hidden_act": "gelu",
              "multimodal_projector_bias": True},
    "internvl": {"vision_feature_layer": -1, "vision_feature_select_strategy": "default",
                 "projector_hidden_act": "gelu"}}
_LLAVA_UNSTATED: Settings = {"vision_feature_layer": -2, "vision_feature_select_strategy": "default"}
_TOWER_FIXED: Settings = {
    "num_channels": 3, "attention_dropout": 0.0, "hidden_dropout_prob": 0.0, "projection_dropout": 0.0,
    "use_qk_norm": False, "norm_type": "layer_norm", "use_mask_token": False, "use_absolute_position_embeddings": True}


def is_vision(settings: Settings) -> bool:
    return settings.get("model_type") in get_args(VisionFamily)


def not_computed(settings: Settings) -> Iterator[str]:
    family: VisionFamily = settings["model_type"]
    stated = (_LLAVA_UNSTATED if family == "llava" else {}) | settings
    for part, fixed in ((stated, _FIXED[family]), (settings["vision_config"], _TOWER_FIXED)):
        yield from (f"{key}={part[key]!r}" for key, only in fixed.items() if part.get(key, only) not in (only, None))
    if (found := settings["vision_config"].get("model_type", _TOWERS[family])) != _TOWERS[family]:
        yield f"a vision tower of the kind {found!r}"


def fields(settings: Settings) -> Settings:
    """The fields that a vision-language model has beside those of its decoder, and what it says of the decoder itself.
    Raises KeyError for what is not stated, UnreadableError for what is not computed."""
    family: VisionFamily = settings["model_type"]
    tower, own = settings["vision_config"], family == "internvl"
    mean, std = _MEAN.get(family, ([0.5] * 3, [0.5] * 3))
    shuffle = {"llava": 1, "internvl": round(1 / settings.get("downsample_ratio", 0.5))}.get(
        family, settings.get("scale_factor", 2))
    name = tower.get("hidden_act", "gelu" if own else "gelu_pytorch_tanh")
    vision = {
        "image_size": _side(tower["image_size"]), "patch_size": _side(tower["patch_size"]),
        "width": tower["hidden_size"], "layers": tower["num_hidden_layers"], "heads": tower["num_attention_heads"],
        "hidden": tower["intermediate_size"], "eps": tower.get("layer_norm_eps", 1e-6),
        "activation": GELUS.get(name, name), "biases": tower.get("attention_bias", False) if own else True,
        "class_token": own, "layer_scale": (tower.get("layer_scale_init_value") or 0.1) if own else None,
        # What LLaVA reads of layer -1 is what the last block gives.
        "final_norm": not tower.get("use_mean_pooling", True) if own else family != "llava", "mean": mean, "std": std,
        "shuffle": shuffle, "order": {"llava": "llava", "internvl": "internvl"}.get(family, "idefics"),
        "family": family}
    token = settings.get("image_token_id", settings.get("image_token_index"))
    if token is None:
        raise KeyError("image_token_id")
    return {"vision": vision, "picture_token": token, "tied": tied(settings)}


def tied(settings: Settings) -> bool:
    """The whole states it; LLaVA's decoder may, too."""
    family, text = settings["model_type"], settings["text_config"]
    stated = settings.get("tie_word_embeddings", family == "internvl")
    return bool(stated or (family == "llava" and text.get("tie_word_embeddings", False)))


def settings(vlm: VLM, text: Settings) -> Settings:
    """A config.json whose text_config is `text`. Raises ConfigError where there is no place for this shape."""
    vision, family = vlm.vision, vlm.vision.family
    if family is None:
        raise ConfigError("model.vision.family=null: no layout of Hugging Face has a place for this tower and "
                          "projector, so these weights stay in forge's snapshots.")
    if vlm.family == "gpt2":
        raise ConfigError(f"The layout model.vision.family={family} has no place for model.family=gpt2.")
    tower: Settings = {
        "model_type": _TOWERS[family], "image_size": vision.image_size, "patch_size": vision.patch_size,
        "hidden_size": vision.width, "num_hidden_layers": vision.layers, "num_attention_heads": vision.heads,
        "intermediate_size": vision.hidden, "layer_norm_eps": vision.eps,
        "hidden_act": "gelu" if vision.activation == "gelu" else "gelu_pytorch_tanh"}
    whole: Settings = {"model_type": family, "architectures": [ARCHITECTURES[family]], "text_config": text,
                       "vision_config": tower, "tie_word_embeddings": vlm.tied, **_FIXED[family]}
    if family == "llava":
        tower["vision_use_head"] = False
        return whole | {"image_token_index": vlm.picture_token, "image_seq_length": vision.tokens_per_picture}
    if family == "internvl":
        tower |= {"attention_bias": vision.biases, "layer_scale_init_value": vision.layer_scale,
                  "use_mean_pooling": not vision.final_norm, "image_size": [vision.image_size] * 2,
                  "patch_size": [vision.patch_size] * 2}
        return whole | {"image_token_id": vlm.picture_token, "downsample_ratio": 1 / vision.shuffle,
                        "image_seq_length": vision.tokens_per_picture}
    return whole | {"image_token_id": vlm.picture_token, "scale_factor": vision.shuffle}


def _side(size: Any) -> int:
    sides = size if isinstance(size, list) else [size]
    if len(set(sides)) != 1:
        raise UnreadableError(f"Pictures and patches of {sides} are not computed; squares are.")
    return int(sides[0])
