"""Under which names a vision-language family's checkpoints hold tower and projector, beside those of a decoder."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torch import Tensor

from forge.errors import ConfigError
from forge.model.layouts import HEAD, Layout, Rows, Rule, Same, Shape, of_text
from forge.model.vision import Vision
from forge.model.vlm import VLM

BOTH = ("weight", "bias")


@dataclass(frozen=True)
class Viewed:
    """[...] here, the same numbers with more axes on disk, as `there` makes them of our shape."""

    name: str
    there: Callable[[Shape], Shape]
    here: Callable[[Shape], Shape]

    def shapes(self, shape: Shape) -> dict[str, Shape]:
        return {self.name: self.there(shape)}

    def read(self, tensor: Callable[[str], Tensor]) -> Tensor:
        found = tensor(self.name)
        return found.reshape(self.here(tuple(found.shape)))

    def write(self, parameter: Tensor) -> dict[str, Tensor]:
        return {self.name: parameter.reshape(self.there(tuple(parameter.shape)))}


def layouts(vlm: VLM) -> list[Layout]:
    """The one that we write first, as transformers 5 saves; then its names in memory, and those of older releases."""
    family = vlm.vision.family
    if family is None:
        raise ConfigError("model.vision.family=null: no layout of Hugging Face has a place for such a model.")
    if family in ("idefics3", "smolvlm"):
        return list(_joined(vlm, "model.text_model.", HEAD, "model.vision_model.", "model.connector."))
    tower, older = "vision_tower.", "vision_tower.vision_model."
    saved = [_joined(vlm, "language_model.model.", "language_model.lm_head.weight", vision, "multi_modal_projector.")
             for vision in (tower, older)]
    in_memory = _joined(vlm, "model.language_model.", HEAD, f"model.{tower}", "model.multi_modal_projector.")
    return [layout for several in (saved[0], in_memory, saved[1]) for layout in several]


def _joined(vlm: VLM, text: str, head: str, tower: str, projector: str) -> Iterator[Layout]:
    rules = (_internvl if vlm.vision.family == "internvl" else _siglip)(vlm.vision, tower)
    rules |= _projector(vlm.vision, projector)
    # SigLIP's pooling head, which no vision-language model uses, and the mask of InternVL's pretraining.
    unused = rf"{re.escape(tower)}(head\..*|embeddings\.(mask_token|position_ids))"
    idle: dict[str, Shape] = {} if vlm.vision.final_norm or vlm.vision.family == "internvl" else {
        f"{tower}post_layernorm.{kind}": (vlm.vision.width,) for kind in BOTH}
    for layout in of_text(vlm, text, head):
        yield Layout(layout.rules | rules, re.compile(f"{layout.surplus.pattern}|{unused}"), head, idle)


def _projector(vision: Vision, there: str) -> dict[str, Rule]:
    if vision.order == "idefics":
        return {"projector.linear.weight": Same(f"{there}modality_projection.proj.weight")}
    names = {"up": "linear_1", "down": "linear_2"} | ({} if vision.order == "llava" else {"norm": "layer_norm"})
    return {f"projector.{ours}.{kind}": Same(f"{there}{theirs}.{kind}")
            for ours, theirs in names.items() for kind in BOTH}


def _siglip(vision: Vision, there: str) -> dict[str, Rule]:
    rules: dict[str, Rule] = {
        "vision.patch.weight": _convolution(f"{there}embeddings.patch_embedding.weight", vision),
        "vision.patch.bias": Same(f"{there}embeddings.patch_embedding.bias"),
        "vision.position_embedding.weight": Same(f"{there}embeddings.position_embedding.weight")}
    if vision.final_norm:
        rules |= {f"vision.final_norm.{kind}": Same(f"{there}post_layernorm.{kind}") for kind in BOTH}
    for layer in range(vision.layers):
        rules |= _block(vision, layer, f"{there}encoder.layers.{layer}.", {
            "attention_norm": "layer_norm1", "attention.out": "self_attn.out_proj", "feed_forward_norm": "layer_norm2",
            "feed_forward.up": "mlp.fc1", "feed_forward.down": "mlp.fc2"}, "self_attn.")
    return rules


def _internvl(vision: Vision, there: str) -> dict[str, Rule]:
    rules: dict[str, Rule] = {
        "vision.patch.weight": _convolution(f"{there}embeddings.patch_embeddings.projection.weight", vision),
        "vision.patch.bias": Same(f"{there}embeddings.patch_embeddings.projection.bias"),
        "vision.position_embedding.weight": _behind_ones(f"{there}embeddings.position_embeddings", 1),
        "vision.class_token": _behind_ones(f"{there}embeddings.cls_token", 2)}
    if vision.final_norm:
        rules |= {f"vision.final_norm.{kind}": Same(f"{there}layernorm.{kind}") for kind in BOTH}
    for layer in range(vision.layers):
        prefix = f"{there}encoder.layer.{layer}."
        rules |= _block(vision, layer, prefix, {
            "attention_norm": "layernorm_before", "attention.out": "attention.projection_layer",
            "feed_forward_norm": "layernorm_after", "feed_forward.up": "mlp.fc1", "feed_forward.down": "mlp.fc2"},
            "attention.")
        rules[f"vision.blocks.{layer}.attention_scale"] = Same(f"{prefix}lambda_1")
        rules[f"vision.blocks.{layer}.feed_forward_scale"] = Same(f"{prefix}lambda_2")
    return rules


def _block(vision: Vision, layer: int, there: str, names: dict[str, str], attention: str) -> dict[str, Rule]:
    here = f"vision.blocks.{layer}."
    rules: dict[str, Rule] = {f"{here}{ours}.{kind}": Same(f"{there}{theirs}.{kind}")
                              for ours, theirs in names.items() for kind in BOTH}
    for kind in BOTH if vision.biases else BOTH[:1]:
        three = tuple(f"{there}{attention}{letter}_proj.{kind}" for letter in "qkv")
        rules[f"{here}attention.qkv.{kind}"] = Rows(three, (vision.width,) * 3)
    return rules


def _convolution(name: str, vision: Vision) -> Rule:
    """[width, 3 * patch ** 2] here; [width, 3, patch, patch] on disk."""
    return Viewed(name, lambda shape: (shape[0], 3, vision.patch_size, vision.patch_size),
                  lambda shape: (shape[0], shape[1] * shape[2] * shape[3]))


def _behind_ones(name: str, ones: int) -> Rule:
    return Viewed(name, lambda shape: (1,) * ones + shape, lambda shape: shape[ones:])
