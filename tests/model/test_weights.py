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
from forge.model.families import DEEPSEEK
from forge.model.huggingface import decoder_of, differences, read_config, settings_of
from forge.model.layouts import layouts
from forge.model.positions import Rotary
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
        for name in ("mixtral", "deepseek_v3"):
            shared = replace(SMALL[name].routing, shared_hidden=hidden if name == "deepseek_v3" else 0)
            decoder, folder = replace(SMALL[name], hidden=hidden, routing=shared), tmp_path / f"{name}_{hidden}"
            _assert_same(_written(decoder, folder), _read(decoder, folder))


def test_selection_biases_are_written_where_there_is_a_place_for_them(tmp_path):
    for name, place in (("dots1", True), ("mixtral", False)):
        state = SMALL[name].build(parts()).state_dict()
        save_weights(state, SMALL[name], tmp_path / name, {})
        biases = [there for there in load_file(tmp_path / name / "model.safetensors") if "bias" in there]
        assert biases == (["model.layers.1.mlp.gate.e_score_correction_bias"] if place else [])
        state["blocks.1.feed_forward.bias"][2] = 0.5
        if place:
            save_weights(state, SMALL[name], tmp_path / "moved", {})
            assert _read(SMALL[name], tmp_path / "moved")["blocks.1.feed_forward.bias"].tolist() == [0, 0, .5, 0, 0, 0]
        else:
            with pytest.raises(ConfigError, match=r"no place for selection biases, and .* blocks.1.feed_forward.bias"):
                save_weights(state, SMALL[name], tmp_path / "moved_too", {})


def test_layers_that_predict_further_tokens_are_not_read_and_it_is_said(tmp_path, monkeypatch):
    sentences = []
    monkeypatch.setattr(weights, "say", sentences.append)
    decoder, folder = SMALL["deepseek_v3"], tmp_path / "f"
    wanted = _written(decoder, folder)
    _edit_tensors(lambda tensors: tensors.update({"model.layers.2.eh_proj.weight": torch.ones(2)}))(folder)
    with pytest.raises(UnreadableError, match=r"also holds model.layers.2.eh_proj.weight"):
        _read(decoder, folder)
    _edit_config(num_nextn_predict_layers=1)(folder)
    _assert_same(wanted, _read(decoder, folder))
    assert len(sentences) == 1 and "model.layers.2.eh_proj.weight" in sentences[0] and "not read" in sentences[0]


@pytest.mark.parametrize("family, changes, words", [
    ("deepseek_v3", {"scoring_func": "softmax"}, "does not compute: scoring_func='softmax'"),
    ("deepseek_v3", {"topk_method": "group_limited_greedy"}, "topk_method='group_limited_greedy'"),
    ("dots1", {"moe_layer_freq": 2}, "moe_layer_freq=2"),
    ("dots1", {"attention_bias": True}, "attention_bias=True"),
    ("dots1", {"sliding_window": 4, "max_window_layers": 1}, "sliding_window=4 in some layers"),
    ("dots1", {"sliding_window": 4, "layer_types": ["full_attention", "sliding_attention"]}, "sliding_window=4 in"),
    ("deepseek_v3", {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}},
     "weights in the format 'fp8' .*; convert them to bfloat16 first"),
    ("deepseek_v3", {"rope_scaling": {"type": "dynamic", "factor": 40}}, "Rotary positions scaled by .*dynamic"),
    ("deepseek_v3", {"rope_scaling": {"type": "yarn", "factor": 40, "original_max_position_embeddings": 16}}, None),
    ("deepseek_v3", {"n_group": None, "topk_group": None}, None),
    ("dots1", {"sliding_window": 4, "max_window_layers": 2, "n_shared_experts": None}, None),
    ("dots1", {"scoring_func": "sigmoid"}, None),
    ("deepseek_v3", {"n_group": "many"}, "does not fit"),
    ("deepseek_v3", {"model_type": "qwen2_moe"}, "'qwen2_moe', with a gate on the shared expert, which"),
    ("deepseek_v3", {"model_type": "deepseek_v2"}, "'deepseek_v2', with groups of experts judged by their best one")])
def test_what_deepseeks_families_may_state(family, changes, words, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(settings_of(SMALL[family]) | changes))
    if words is None:
        decoder_of(read_config(tmp_path), "config.json")
        return
    with pytest.raises(UnreadableError, match=words):
        decoder_of(read_config(tmp_path), "config.json")


@pytest.mark.parametrize("key", ["n_group", "topk_group", "routed_scaling_factor", "norm_topk_prob", "q_lora_rank",
                                 "first_k_dense_replace", "n_shared_experts", "v_head_dim"])
def test_what_deepseeks_config_leaves_out_is_not_guessed(key):
    """Transformers has a default for each, which is that of one model."""
    settings = settings_of(SMALL["deepseek_v3"])
    del settings[key]
    with pytest.raises(UnreadableError, match=f"does not state {key}"):
        decoder_of(settings, "config.json")


def _again(decoder):
    return decoder_of(json.loads(json.dumps(settings_of(decoder))), "config.json")


@ALL
def test_the_settings_round_trip(name):
    decoder, again = SMALL[name], _again(SMALL[name])
    assert differences(again, decoder) == [] and again.family == decoder.family
    assert (again.dropout, again.init_std, again.fused_qkv) == (decoder.dropout, decoder.init_std, decoder.fused_qkv)
    if decoder.routing is not None and decoder.family not in DEEPSEEK:
        weighted = _again(replace(decoder, routing=replace(decoder.routing, aux_loss=0.5)))
        assert weighted.routing.aux_loss == pytest.approx(0.5)


OTHERWISE = {"num_experts": 12, "top_k": 4, "score": None, "normalize": None, "scale": 1.5, "num_groups": 2,
             "top_groups": 3, "shared_hidden": 60}
ONLY_TRAINING = {"jitter", "aux_loss", "aux_scope", "z_loss", "balance", "bias_rate", "threshold", "load_decay",
                 "balance_from", "balance_ramp", "capacity_factor"}


@pytest.mark.parametrize("name", [name for name, decoder in SMALL.items() if decoder.routing is not None])
@pytest.mark.parametrize("field", OTHERWISE)
def test_what_a_routing_computes_is_written_or_refused(name, field):
    before = SMALL[name].routing
    value = {"normalize": not before.normalize, "score": "sigmoid" if before.score == "softmax" else "softmax"}.get(
        field, OTHERWISE[field])
    decoder = replace(SMALL[name], routing=replace(before, **{field: value}))
    assert value != getattr(before, field)
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
                                  "olmoe_1b_7b", "qwen3_30b_a3b", "moonlight_16b_a3b", "dots1_142b_a14b",
                                  "deepseek_v3"])
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
    "unknown_rope": (_edit_config(rope_scaling={"rope_type": "longrope"}), "Rotary positions scaled by"),
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
    (replace(LLAMA, family="dots1"), "no place for model.routing=null"),
    (replace(LLAMA, rotary=Rotary(10000.0, True, None)), "no place for model.rotary.interleaved=True"),
    (replace(SMALL["deepseek_v3"], family="dots1"), "no place for .*model.latent.kv_rank=20"),
    (replace(SMALL["dots1"], family="deepseek_v3"), "no place for model.latent=null"),
    (replace(SMALL["dots1"], family="qwen3_moe"), "no place for model.dense_first.hidden=48, model.dense_first.lay"),
    (replace(SMALL["dots1"], biases=True), "no place for model.biases=True"),
    (replace(SMALL["olmoe"], biases="qkv"), "no place for model.biases='qkv'"),
    (replace(SMALL["llama"], biases="qkv"), "no place for model.biases='qkv'"),
    (replace(SMALL["qwen2"], biases=False), "no place for model.biases=False"),
    (replace(SMALL["qwen2"], biases=True), "no place for model.biases=True"),
    (replace(SMALL["deepseek_v3"], latent=replace(SMALL["deepseek_v3"].latent, eps=1e-5)),
     "no place for model.latent.eps=1e-05"),
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
