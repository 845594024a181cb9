"""Folders of vision-language models: what is refused, in one sentence."""

import json
from dataclasses import replace

import pytest
import torch
from decoders import LLAMA, SMALL, parts
from pictures import ORDERS, VISION, small

from forge.errors import ConfigError, UnreadableError
from forge.model.huggingface import decoder_of, differences, settings_of
from forge.model.weights import load_weights, save_weights


def _written(model, folder):
    torch.manual_seed(0)
    save_weights(model.build(parts()).state_dict(), model, folder, {})
    return folder


@pytest.mark.parametrize("order, part, changes, words", [
    ("llava", None, {"vision_feature_layer": -2}, "vision_feature_layer=-2"),
    ("llava", None, {"vision_feature_layer": None}, "does not state|vision_feature_layer"),
    ("llava", None, {"vision_feature_select_strategy": "default"}, "vision_feature_select_strategy='default'"),
    ("llava", "vision_config", {"model_type": "clip_vision_model"}, "a vision tower of the kind 'clip_vision_model'"),
    ("internvl", "vision_config", {"use_qk_norm": True}, "use_qk_norm=True"),
    ("internvl", "vision_config", {"norm_type": "rms_norm"}, "norm_type='rms_norm'"),
    ("internvl", "vision_config", {"image_size": [8, 16]}, r"\[8, 16\] are not computed; squares are"),
    ("idefics", "text_config", {"model_type": "mamba"}, "text_config describes model_type='mamba'"),
    ("idefics", "text_config", {"hidden_act": "gelu"}, "hidden_act='gelu'"),
    ("idefics", "vision_config", {"hidden_act": "relu"}, "vision.activation='relu'"),
    ("idefics", None, {"vision_config": None}, "does not fit|vision_config"),
    ("idefics", None, {"image_token_id": None}, "does not state image_token_id")])
def test_what_is_not_computed_is_refused(order, part, changes, words):
    settings = json.loads(json.dumps(settings_of(small(order))))
    changed = settings if part is None else settings[part]
    changed.update(changes)
    for name in [name for name, value in changes.items() if value is None]:
        del changed[name]
    with pytest.raises(UnreadableError, match=words):
        decoder_of(settings, "config.json")


@pytest.mark.parametrize("model, words", [
    (small("eagle"), "model.vision.family=null: no layout of Hugging Face has a place"),
    (small(**vars(SMALL["gpt2"])), "family=idefics3 has no place for model.family=gpt2"),
    (small(vision=replace(VISION, order="internvl")), "no place for model.vision.order='internvl'"),
    (small(vision=replace(VISION, class_token=True)), "no place for model.vision.class_token=True"),
    (small("llava", vision=replace(ORDERS["llava"], final_norm=True)), "no place for model.vision.final_norm=True"),
    (small("internvl", vision=replace(ORDERS["internvl"], layer_scale=None)), "no place for .*layer_scale=False"),
    (small(attention_gate="head"), "no place for model.attention_gate='head'")])
def test_what_a_layout_of_theirs_cannot_hold_is_not_written(model, words, tmp_path):
    with pytest.raises(ConfigError, match=words):
        save_weights({}, model, tmp_path / "f", {})
    assert not list(tmp_path.iterdir())


def test_weights_of_another_kind_are_refused(tmp_path):
    seeing, text = _written(small(), tmp_path / "seeing"), _written(SMALL["llama"], tmp_path / "text")
    with pytest.raises(ConfigError, match=r"seeing holds weights of one that sees pictures, and this model is one o"):
        load_weights(LLAMA.build(parts()), LLAMA, seeing)
    with pytest.raises(ConfigError, match=r"text holds weights of one of text alone, and this model is one that sees"):
        load_weights(small().build(parts()), small(), text)
    with pytest.raises(ConfigError, match=r"model.vision.shuffle=1, but the weights in .* were trained with 2"):
        load_weights(small().build(parts()), small(vision=replace(VISION, shuffle=1)), seeing)


@pytest.mark.parametrize("order", ["idefics", "llava", "internvl"])
def test_a_config_says_the_model_it_was_made_of(order):
    model = small(order)
    assert not differences(model, decoder_of(settings_of(model), "config.json"))
