"""Folders of weights: what is read, what is written, and what is refused in one sentence."""

import json
import pickle
import re
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch
from decoders import LLAMA, ROUTING, SMALL, parts, preset
from safetensors.torch import load_file, save_file

from forge.errors import ConfigError, UnreadableError
from forge.model import weights
from forge.model.huggingface import decoder_of, differences, read_config, settings_of
from forge.model.layouts import layouts
from forge.model.weights import companions, load_weights, save_weights
from forge.moe_router import Routing

ALL = pytest.mark.parametrize("name", SMALL)


def _written(decoder, folder, seed=0):
    torch.manual_seed(seed)
    network = decoder.build(parts())
    save_weights(network.state_dict(), decoder, folder, {})
    return network.state_dict()


def _read(decoder, folder):
    torch.manual_seed(99)
    return replace(decoder, weights=str(folder)).build(parts()).state_dict()


def _assert_same(one, other):
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@ALL
def test_round_trip(name, tmp_path):
    _assert_same(_written(SMALL[name], tmp_path / "f"), _read(SMALL[name], tmp_path / "f"))


@ALL
def test_round_trip_over_several_files(name, tmp_path, monkeypatch):
    monkeypatch.setattr(weights, "_SHARD_BYTES", 20_000)
    wanted = _written(SMALL[name], tmp_path / "f")
    assert len(list((tmp_path / "f").glob("model-*-of-*.safetensors"))) > 2
    _assert_same(wanted, _read(SMALL[name], tmp_path / "f"))


@ALL
def test_every_layout_of_a_family_is_read(name, tmp_path):
    decoder = SMALL[name]
    wanted = _written(decoder, tmp_path / "f")
    for layout in layouts(decoder):
        tensors = {there: tensor.contiguous().clone() for ours, rule in layout.rules.items()
                   for there, tensor in rule.write(wanted[ours]).items()}
        save_file(tensors, tmp_path / "f/model.safetensors", metadata={"format": "pt"})
        _assert_same(wanted, _read(decoder, tmp_path / "f"))


def test_experts_are_written_as_the_released_checkpoints_name_them(tmp_path):
    wanted = _written(SMALL["mixtral"], tmp_path / "f")
    tensors = load_file(tmp_path / "f/model.safetensors")
    for expert in range(5):
        there = f"model.layers.1.block_sparse_moe.experts.{expert}."
        gate, up = wanted["blocks.1.feed_forward.gate_up"][expert].chunk(2)
        assert torch.equal(tensors[f"{there}w1.weight"], gate) and torch.equal(tensors[f"{there}w3.weight"], up)
        assert torch.equal(tensors[f"{there}w2.weight"], wanted["blocks.1.feed_forward.down"][expert])


def test_square_experts_are_not_transposed(tmp_path):
    """2 * hidden = width, and hidden = width: where a guess by shape goes wrong."""
    for hidden in (16, 32):
        decoder = replace(LLAMA, hidden=hidden, routing=ROUTING, family="mixtral")
        _assert_same(_written(decoder, tmp_path / str(hidden)), _read(decoder, tmp_path / str(hidden)))


def _again(decoder):
    return decoder_of(json.loads(json.dumps(settings_of(decoder))), "config.json")


@ALL
def test_the_settings_round_trip(name):
    decoder, again = SMALL[name], _again(SMALL[name])
    assert differences(again, decoder) == [] and again.family == decoder.family
    assert (again.dropout, again.init_std, again.fused_qkv) == (decoder.dropout, decoder.init_std, decoder.fused_qkv)
    if decoder.routing is not None:
        assert _again(replace(decoder, routing=replace(decoder.routing, aux_loss=0.5))).routing.aux_loss == 0.5


OTHERWISE = {"num_experts": 6, "top_k": 3, "score": "sigmoid", "normalize": None, "scale": 1.5, "groups": 2,
             "top_groups": 2, "shared_hidden": 96}
ONLY_TRAINING = {"jitter", "aux_loss", "aux_scope", "z_loss", "balance", "bias_rate", "threshold", "load_decay",
                 "balance_from", "balance_ramp", "capacity_factor"}


@pytest.mark.parametrize("name", [name for name, decoder in SMALL.items() if decoder.routing is not None])
@pytest.mark.parametrize("field", OTHERWISE)
def test_what_a_routing_computes_is_written_or_refused(name, field):
    before = SMALL[name].routing
    value = not before.normalize if field == "normalize" else OTHERWISE[field]
    decoder = replace(SMALL[name], routing=replace(before, **{field: value}))
    if value == getattr(before, field):
        return
    try:
        assert getattr(_again(decoder).routing, field) == value
    except ConfigError as error:
        assert re.search(rf"no place for .*model.routing.{field}=", str(error))


def test_every_setting_of_a_routing_is_known_to_change_results_or_not_to():
    assert {field.name for field in fields(Routing)} == OTHERWISE.keys() | ONLY_TRAINING


def test_a_softmax_of_the_chosen_is_a_normalised_softmax():
    decoder = replace(SMALL["mixtral"], routing=replace(ROUTING, score="softmax_of_chosen", normalize=False))
    assert settings_of(decoder) == settings_of(SMALL["mixtral"])
    assert [name for name, _, _ in differences(decoder, replace(decoder, routing=replace(ROUTING, normalize=False)))] \
        == ["model.routing.normalize"]


@pytest.mark.parametrize("name", ["moe_tiny", "gpt2_1558m", "llama_160m", "llama_1b", "llama_8b", "mixtral_8x7b",
                                  "olmoe_1b_7b", "qwen3_30b_a3b"])
def test_every_preset_has_a_layout(name):
    settings_of(preset(name))


def test_lower_precision_is_read_exactly(tmp_path):
    wanted = _written(LLAMA, tmp_path / "f")
    path = tmp_path / "f/model.safetensors"
    save_file({name: tensor.bfloat16() for name, tensor in load_file(path).items()}, path)
    found = _read(LLAMA, tmp_path / "f")
    assert all(found[name].dtype == torch.float32 and torch.equal(found[name], wanted[name].bfloat16().float())
               for name in wanted)


def test_tokenizer_files_and_special_tokens_go_along(tmp_path):
    _written(SMALL["gpt2"], tmp_path / "origin")
    (tmp_path / "origin/tokenizer.json").write_text("{}")
    config = json.loads((tmp_path / "origin/config.json").read_text()) | {"eos_token_id": 7}
    (tmp_path / "origin/config.json").write_text(json.dumps(config))
    state = _read(SMALL["gpt2"], tmp_path / "origin")
    save_weights(state, SMALL["gpt2"], tmp_path / "f", companions(tmp_path / "origin"))
    assert (tmp_path / "f/tokenizer.json").read_text() == "{}"
    assert read_config(tmp_path / "f")["eos_token_id"] == 7


def test_masks_of_the_released_gpt2_are_ignored_and_a_head_equal_to_the_embedding_too(tmp_path):
    wanted = _written(SMALL["gpt2"], tmp_path / "f")
    path = tmp_path / "f/model.safetensors"
    tensors = load_file(path)
    tensors["transformer.h.0.attn.bias"] = torch.ones(1, 1, 4, 4)
    tensors["lm_head.weight"] = tensors["transformer.wte.weight"].clone()
    save_file(tensors, path)
    _assert_same(wanted, _read(SMALL["gpt2"], tmp_path / "f"))
    tensors["lm_head.weight"][0, 0] += 1
    save_file(tensors, path)
    with pytest.raises(UnreadableError, match=r"also holds lm_head.weight"):
        _read(SMALL["gpt2"], tmp_path / "f")


class _Bomb:
    def __reduce__(self):
        return Path.touch, (Path("/tmp/forge_test_pickle_was_executed"),)


def _edit_tensors(edit):
    def change(folder):
        tensors = load_file(folder / "model.safetensors")
        edit(tensors)
        save_file(tensors, folder / "model.safetensors")
    return change


def _edit_config(**changes):
    def change(folder):
        settings = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(settings | changes))
    return change


def _only_pickle(name):
    def change(folder):
        (folder / "model.safetensors").unlink()
        (folder / name).write_bytes(pickle.dumps(_Bomb()))
    return change


def _index(weight_map):
    def change(folder):
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return change


DOWN = "model.layers.0.mlp.down_proj.weight"
DAMAGE = {
    "no_config": (lambda folder: (folder / "config.json").unlink(), "has no config.json"),
    "config_no_json": (lambda folder: (folder / "config.json").write_text("{"), "config.json cannot be read"),
    "config_list": (lambda folder: (folder / "config.json").write_text("[]"), "known are gpt2, llama"),
    "unknown_family": (_edit_config(model_type="mamba"), "model_type='mamba'"),
    "not_computed": (_edit_config(hidden_act="relu"), "does not compute: hidden_act='relu'"),
    "unknown_rope": (_edit_config(rope_scaling={"rope_type": "yarn"}), "Rotary positions scaled by"),
    "size_missing": (_edit_config(hidden_size=None), "does not fit|does not state"),
    "no_heads": (_edit_config(num_attention_heads=0, head_dim=None), "does not fit"),
    "rope_is_text": (_edit_config(rope_scaling="long"), "does not fit"),
    "size_is_text": (_edit_config(vocab_size="many"), "vocab_size='many': a whole number is wanted"),
    "no_tensors": (lambda folder: (folder / "model.safetensors").unlink(), "has neither model.safetensors nor"),
    "pickle_bin": (_only_pickle("pytorch_model.bin"), "pytorch_model.bin is a pickle, which can hold code"),
    "pickle_pt": (_only_pickle("model.pt"), "model.pt is a pickle"),
    "pickle_renamed": (_only_pickle("model.safetensors"), "damaged, or not a safetensors file"),
    "empty": (lambda folder: (folder / "model.safetensors").write_bytes(b""), "damaged, or not a safetensors file"),
    "cut_short": (lambda folder: (folder / "model.safetensors").write_bytes(
        (folder / "model.safetensors").read_bytes()[:-100]), "damaged, or not a safetensors file"),
    "missing": (_edit_tensors(lambda tensors: tensors.pop(DOWN)), f"it misses {DOWN}"),
    "left_over": (_edit_tensors(lambda tensors: tensors.update(more=torch.ones(1))), "it also holds more"),
    "shape": (_edit_tensors(lambda tensors: tensors.update({DOWN: tensors[DOWN].T.contiguous()})),
              rf"another shape {DOWN} \[48, 32\] \(wanted: \[32, 48\]\)"),
    "quantised": (_edit_tensors(lambda tensors: tensors.update({DOWN: tensors[DOWN].to(torch.int8)})),
                  f"another format than floating point {DOWN}"),
    "index_elsewhere": (_index({DOWN: "../model.safetensors"}), r"names '../model.safetensors', which is not"),
    "index_to_pickle": (_index({DOWN: "pytorch_model.bin"}), "which is not a safetensors file beside it"),
    "index_damaged": (_index([]), "names no files"),
    "shard_missing": (_index({DOWN: "other.safetensors"}), "other.safetensors is missing"),
    "shard_without_tensor": (_index({"nothing": "model.safetensors"}), "has no tensor nothing"),
}


@pytest.mark.parametrize("change, words", DAMAGE.values(), ids=DAMAGE)
def test_damaged_and_foreign_folders_are_refused_and_change_nothing(change, words, tmp_path):
    _written(LLAMA, tmp_path / "f", seed=1)
    torch.manual_seed(0)
    network = LLAMA.build(parts())
    before = {name: value.clone() for name, value in network.state_dict().items()}
    change(tmp_path / "f")
    with pytest.raises(UnreadableError, match=words):
        load_weights(network, LLAMA, tmp_path / "f")
    _assert_same(before, network.state_dict())
    assert not Path("/tmp/forge_test_pickle_was_executed").exists()


@pytest.mark.parametrize("change, words", [
    ({"eps": 1e-6}, "model.eps=1e-06, but the weights in .* were trained with 1e-05"),
    ({"width": 64}, "model.width=64, .* with 32"),
    ({"rotary": replace(LLAMA.rotary, base=5e5)}, "model.rotary.base=500000.0, .* with 10000.0"),
    ({"family": "mixtral", "routing": ROUTING}, "holds weights of family llama, and model.family=mixtral")])
def test_weights_of_another_model_are_refused(change, words, tmp_path):
    _written(LLAMA, tmp_path / "f")
    with pytest.raises(ConfigError, match=words):
        _read(replace(LLAMA, **change), tmp_path / "f")


def test_settings_of_the_run_may_differ(tmp_path):
    _written(SMALL["mixtral"], tmp_path / "f")
    _read(replace(SMALL["mixtral"], dropout=0.1, max_length=128, init_std=0.5,
                  routing=replace(ROUTING, aux_loss=0.5, z_loss=0.1)), tmp_path / "f")


@pytest.mark.parametrize("decoder, words", [
    (replace(LLAMA, window=4), "family=llama has no place for model.window=4"),
    (replace(SMALL["gpt2"], kv_heads=2), "family=gpt2 has no place for model.kv_heads=2"),
    (replace(LLAMA, rotary=None), "no place for learned positions"),
    (replace(LLAMA, family="olmoe"), "no place for model.routing=null"),
    (replace(SMALL["mixtral"], routing=replace(ROUTING, normalize=False)), "model.routing.normalize=False")])
def test_what_a_layout_cannot_hold_is_not_written(decoder, words, tmp_path):
    with pytest.raises(ConfigError, match=words):
        save_weights({}, decoder, tmp_path / "f", {})
    assert not list(tmp_path.iterdir())


def test_nothing_is_written_over(tmp_path):
    _written(LLAMA, tmp_path / "f")
    with pytest.raises(ConfigError, match="is there already"):
        _written(LLAMA, tmp_path / "f")


def test_weights_of_another_model_are_not_written(tmp_path):
    state = _written(LLAMA, tmp_path / "f")
    with pytest.raises(ConfigError, match=r"they miss .*; they also hold head.weight"):
        save_weights(state, SMALL["gpt2"], tmp_path / "g", {})
