"""The vision-language model against transformers, which nobody here wrote: logits, loss and every parameter's gradient.

A small random model of each family is saved by transformers and read by forge. Both compute in float32, so they may
differ by rounding only: at most 1e-5 of the norm of each tensor. Rows of the batch have two pictures, one and none.
"""

import pytest
import torch
from decoders import parts
from pictures import PICTURE, batch_of, error
from transformers import (
    AutoModelForImageTextToText,
    Idefics3Config,
    Idefics3ForConditionalGeneration,
    InternVLConfig,
    InternVLForConditionalGeneration,
    LlavaConfig,
    LlavaForConditionalGeneration,
    SmolVLMConfig,
    SmolVLMForConditionalGeneration,
)

from forge.batch import IGNORED
from forge.model.huggingface import decoder_of, read_config
from forge.model.layouts import layouts
from forge.model.weights import companions, load_weights, save_weights

TOLERANCE = 1e-5
TEXT = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 64, "head_dim": 8, "bos_token_id": 0, "eos_token_id": 1,
        "pad_token_id": None}
TOWER = {"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 3, "patch_size": 4}
LLAMA, QWEN2, QWEN = ({"model_type": name, **TEXT} for name in ("llama", "qwen2", "qwen3"))
SIGLIP = {"model_type": "siglip_vision_model", "vision_use_head": False, "image_size": 8, **TOWER}
FULL = {"vision_feature_layer": -1, "vision_feature_select_strategy": "full", "image_seq_length": 4}
MODELS = {
    "idefics3": lambda: Idefics3ForConditionalGeneration(Idefics3Config(
        vision_config={"image_size": 16, **TOWER}, text_config=LLAMA, scale_factor=2, image_token_id=PICTURE)),
    "smolvlm_tied": lambda: SmolVLMForConditionalGeneration(SmolVLMConfig(
        vision_config={"image_size": 24, **TOWER}, text_config=LLAMA, scale_factor=3, image_token_id=PICTURE,
        tie_word_embeddings=True)),
    "llava_qwen3": lambda: LlavaForConditionalGeneration(LlavaConfig(
        vision_config=SIGLIP, text_config=QWEN, image_token_index=PICTURE, **FULL)),
    "llava_head": lambda: LlavaForConditionalGeneration(LlavaConfig(
        vision_config={**SIGLIP, "vision_use_head": True}, text_config=LLAMA, image_token_index=PICTURE, **FULL)),
    "llava_pixels_left_over": lambda: LlavaForConditionalGeneration(LlavaConfig(
        vision_config={**SIGLIP, "image_size": 15}, text_config=LLAMA, image_token_index=PICTURE,
        **FULL | {"image_seq_length": 9})),
    "idefics3_pixels_left_over": lambda: Idefics3ForConditionalGeneration(Idefics3Config(
        vision_config={"image_size": 18, **TOWER}, text_config=LLAMA, scale_factor=2, image_token_id=PICTURE)),
    "internvl_pixels_left_over": lambda: InternVLForConditionalGeneration(InternVLConfig(
        vision_config={"image_size": 19, **TOWER}, text_config=LLAMA, image_token_id=PICTURE)),
    "internvl_qwen3": lambda: InternVLForConditionalGeneration(InternVLConfig(
        vision_config={"image_size": 16, **TOWER}, text_config=QWEN, image_token_id=PICTURE,
        tie_word_embeddings=False)),
    "internvl_qwen2": lambda: InternVLForConditionalGeneration(InternVLConfig(
        vision_config={"image_size": 16, **TOWER}, text_config=QWEN2, image_token_id=PICTURE,
        tie_word_embeddings=False)),
    "llava_qwen2_tied": lambda: LlavaForConditionalGeneration(LlavaConfig(
        vision_config=SIGLIP, text_config=QWEN2, image_token_index=PICTURE, tie_word_embeddings=True, **FULL)),
    "internvl_biased": lambda: InternVLForConditionalGeneration(InternVLConfig(
        vision_config={"image_size": 32, "attention_bias": True, "use_mean_pooling": False, **TOWER},
        text_config=LLAMA, image_token_id=PICTURE, downsample_ratio=0.25)),
}


@pytest.fixture(params=MODELS)
def reference(request):
    torch.manual_seed(0)
    model = MODELS[request.param]().eval()
    model.set_attn_implementation("eager")
    with torch.no_grad():               # biases and norms too: a zero or a one would hide a mistake
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


@pytest.fixture
def folder(reference, tmp_path):
    reference.save_pretrained(tmp_path / "reference")
    return tmp_path / "reference"


def _load(folder):
    vlm = decoder_of(read_config(folder), "config.json")
    network = vlm.build(parts())
    load_weights(network, vlm, folder)
    return vlm, network


def _theirs(reference, batch):
    """Their logits. Idefics3 wants pictures by row, and takes those that are all zero for padding."""
    pictures = batch.tensors["pictures"]
    if "idefics" in reference.config.model_type or "smolvlm" in reference.config.model_type:
        by_row = torch.zeros(3, 2, *pictures.shape[1:])
        by_row[0], by_row[1, 0] = pictures[:2], pictures[2]
        pictures = by_row
    return reference(input_ids=batch.tensors["tokens"], pixel_values=pictures).logits


def test_logits_and_gradients(reference, folder):
    vlm, network = _load(folder)
    batch = batch_of(vlm)
    logits = _theirs(reference, batch)
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch.tensors["targets"].flatten(),
                                             ignore_index=IGNORED)
    loss.backward()
    scaled, loss_sum, _ = network(batch, torch.tensor(1 / batch.num_targets))
    scaled.backward()
    errors = {"logits": error(network.logits(batch), logits), "loss": error(loss_sum / batch.num_targets, loss)}
    theirs, parameters = dict(reference.named_parameters()), dict(network.named_parameters())
    layout = next(layout for layout in layouts(vlm) if all(
        name in theirs for ours in parameters for name in layout.rules[ours].shapes((1, 1, 1))))
    assert layout.rules.keys() == parameters.keys()
    read = {there for ours, parameter in parameters.items() for there in layout.rules[ours].shapes(parameter.shape)}
    unread = theirs.keys() - read
    assert unread <= layout.idle.keys() | {layout.head} | {name for name in unread if ".head." in name}
    assert all(theirs[name].grad is None for name in unread - {layout.head})
    for name, parameter in parameters.items():
        wanted = layout.rules[name].read(lambda there: theirs[there].grad)
        assert wanted.norm() > 0, name
        errors[name] = error(parameter.grad, wanted)
    worst = max(errors, key=errors.get)
    print(f"largest relative error: {errors[worst]:.1e} ({worst})")
    assert errors[worst] <= TOLERANCE, errors


def test_round_trip_keeps_every_bit_of_it(reference, folder, tmp_path):
    vlm, network = _load(folder)
    written = tmp_path / "written"
    save_weights(network.state_dict(), vlm, written, companions(folder))
    _, again = _load(written)
    for name, parameter in network.state_dict().items():
        assert torch.equal(again.state_dict()[name], parameter), name
    theirs, loading = AutoModelForImageTextToText.from_pretrained(written, attn_implementation="eager",
                                                                  output_loading_info=True)
    assert not any(loading.values()), loading
    kept = theirs.state_dict()
    assert all(torch.equal(kept[name], parameter) for name, parameter in reference.state_dict().items()
               if ".head." not in name and (vlm.vision.family != "llava" or "post_layernorm" not in name))
    batch = batch_of(vlm)
    with torch.no_grad():
        assert torch.equal(_theirs(theirs.eval(), batch), _theirs(reference, batch))
