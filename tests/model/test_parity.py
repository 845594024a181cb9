"""The decoder against transformers, which nobody here wrote: logits and every parameter's gradient.

A small random model of each family is saved by transformers and read by forge. Both compute in float32, so they may
differ by rounding only: at most 1e-5 of the norm of each tensor.
"""

from dataclasses import replace

import pytest
import torch
from decoders import parts
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Dots1Config,
    Dots1ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    OlmoeConfig,
    OlmoeForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from forge.batch import Batch
from forge.model.huggingface import decoder_of, read_config, settings_of
from forge.model.layouts import layouts
from forge.model.weights import companions, load_weights, save_weights

TOLERANCE = 1e-5
VOCABULARY, ROWS, LENGTH = 61, 3, 24

LLAMA = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
         "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "bos_token_id": 0,
         "eos_token_id": 1, "pad_token_id": None, "attn_implementation": "eager"}
SCALED = {"rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 64}       # so that of 4 frequencies one is kept, one blended, two slowed
YARN = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 8.0, "original_max_position_embeddings": 64,
        "beta_fast": 4.0}                                   # one kept, one slowed, others blended
# Where 2 * hidden or hidden is the width, or a latent's projection is square, a transposed matrix would fit as well.
DEEPSEEK = {**LLAMA, "n_routed_experts": 8, "num_experts_per_tok": 3, "n_shared_experts": 1, "n_group": 4,
            "topk_group": 2, "routed_scaling_factor": 2.5, "norm_topk_prob": True, "first_k_dense_replace": 1,
            "moe_intermediate_size": 16, "rms_norm_eps": 1e-3}
LATENT = {**DEEPSEEK, "num_key_value_heads": 4, "num_nextn_predict_layers": 0, "qk_nope_head_dim": 8,
          "qk_rope_head_dim": 4, "v_head_dim": 8, "kv_lora_rank": 20, "q_lora_rank": 24}
MODELS = {
    "gpt2": lambda: GPT2LMHeadModel(GPT2Config(
        vocab_size=VOCABULARY, n_embd=32, n_layer=3, n_head=4, n_positions=64, resid_pdrop=0.0, embd_pdrop=0.0,
        attn_pdrop=0.0, bos_token_id=0, eos_token_id=1, attn_implementation="eager")),
    "gpt2_untied_exact_gelu": lambda: GPT2LMHeadModel(GPT2Config(
        vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=64, n_inner=40, resid_pdrop=0.0,
        embd_pdrop=0.0, attn_pdrop=0.0, activation_function="gelu", tie_word_embeddings=False,
        attn_implementation="sdpa")),
    "llama_rope_scaling": lambda: LlamaForCausalLM(LlamaConfig(**LLAMA, rope_parameters=SCALED)),
    "llama_yarn": lambda: LlamaForCausalLM(LlamaConfig(**LLAMA, rope_parameters=YARN)),
    "qwen3_moe_yarn_between_places": lambda: Qwen3MoeForCausalLM(Qwen3MoeConfig(
        **LLAMA, head_dim=12, moe_intermediate_size=20, num_experts=6, num_experts_per_tok=3, rope_parameters={
            **YARN, "truncate": False, "attention_factor": 1.3})),
    "llama_biases_tied": lambda: LlamaForCausalLM(LlamaConfig(
        **LLAMA, attention_bias=True, mlp_bias=True, tie_word_embeddings=True)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**LLAMA)),
    "qwen2_tied_wide_heads": lambda: Qwen2ForCausalLM(Qwen2Config(**LLAMA, head_dim=12, tie_word_embeddings=True)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**LLAMA, head_dim=12)),
    "mixtral": lambda: MixtralForCausalLM(MixtralConfig(**LLAMA, num_local_experts=5, num_experts_per_tok=2)),
    "mixtral_window": lambda: MixtralForCausalLM(MixtralConfig(
        **LLAMA, num_local_experts=4, num_experts_per_tok=3, sliding_window=5)),
    "olmoe": lambda: OlmoeForCausalLM(OlmoeConfig(**LLAMA, num_experts=5, num_experts_per_tok=2)),
    "olmoe_clipped": lambda: OlmoeForCausalLM(OlmoeConfig(
        **LLAMA, num_experts=5, num_experts_per_tok=2, clip_qkv=0.5, norm_topk_prob=True)),
    "qwen3_moe": lambda: Qwen3MoeForCausalLM(Qwen3MoeConfig(
        **LLAMA, head_dim=12, moe_intermediate_size=20, num_experts=6, num_experts_per_tok=3, norm_topk_prob=True)),
    "dots1": lambda: Dots1ForCausalLM(Dots1Config(**DEEPSEEK)),
    "dots1_square_no_groups": lambda: Dots1ForCausalLM(Dots1Config(**DEEPSEEK | {
        "moe_intermediate_size": 32, "n_group": 1, "topk_group": 1, "norm_topk_prob": False, "n_shared_experts": 2,
        "first_k_dense_replace": 0, "routed_scaling_factor": 1.0, "head_dim": 12})),
    "deepseek_v3": lambda: DeepseekV3ForCausalLM(DeepseekV3Config(**LATENT)),
    "deepseek_v3_square_halves": lambda: DeepseekV3ForCausalLM(DeepseekV3Config(**LATENT | {
        "moe_intermediate_size": 32, "n_group": 2, "topk_group": 1, "kv_lora_rank": 32, "q_lora_rank": 32,
        "qk_nope_head_dim": 4, "v_head_dim": 4, "rope_interleave": False, "first_k_dense_replace": 2})),
    "deepseek_v3_yarn": lambda: DeepseekV3ForCausalLM(DeepseekV3Config(**LATENT | {
        "qk_rope_head_dim": 8, "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.7}})),
    "deepseek_v3_full_queries": lambda: DeepseekV3ForCausalLM(DeepseekV3Config(**LATENT | {
        "q_lora_rank": None, "v_head_dim": 12, "n_group": 2, "topk_group": 2, "tie_word_embeddings": True})),
}


@pytest.fixture(params=MODELS)
def reference(request):
    torch.manual_seed(0)
    model = MODELS[request.param]().eval()
    with torch.no_grad():               # biases and norms too: a zero or a one would hide a mistake
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(torch.randn_like(buffer) * 0.2)
    return model


@pytest.fixture
def folder(reference, tmp_path):
    reference.save_pretrained(tmp_path / "reference")
    return tmp_path / "reference"


def _load(folder):
    decoder = decoder_of(read_config(folder), "config.json")
    if decoder.routing is not None:     # the reference's loss has no auxiliary part
        decoder = replace(decoder, routing=replace(decoder.routing, aux_loss=0.0))
    network = decoder.build(parts())
    load_weights(network, decoder, folder)
    return decoder, network


def _batch():
    tokens = torch.randint(VOCABULARY, (ROWS, LENGTH + 1), generator=torch.Generator().manual_seed(1))
    return Batch({"tokens": tokens[:, :-1], "targets": tokens[:, 1:].contiguous()}, ROWS * LENGTH, seed=0)


def _error(ours, theirs):
    return ((ours - theirs).norm() / theirs.norm()).item()


def test_logits_and_gradients(reference, folder):
    decoder, network = _load(folder)
    batch = _batch()
    logits = reference(batch.tensors["tokens"]).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch.tensors["targets"].flatten())
    loss.backward()
    scaled, loss_sum, _ = network(batch, torch.tensor(1 / batch.num_targets))
    scaled.backward()

    errors = {"logits": _error(network.logits(batch), logits),
              "loss": _error(loss_sum / batch.num_targets, loss)}
    theirs = dict(reference.named_parameters())         # by the names of one of the layouts on disk
    parameters = dict(network.named_parameters())
    layout = next(layout for layout in layouts(decoder)
                  if all(name in theirs for ours in parameters for name in layout.rules[ours].shapes((1, 1, 1))))
    biases = {name for name in layout.rules.keys() - parameters.keys() if name.endswith(".feed_forward.bias")}
    assert layout.rules.keys() == parameters.keys() | biases
    for name, parameter in parameters.items():
        errors[name] = _error(parameter.grad, layout.rules[name].read(lambda there: theirs[there].grad))
    worst = max(errors, key=errors.get)
    print(f"largest relative error: {errors[worst]:.1e} ({worst})")
    assert errors[worst] <= TOLERANCE, errors


@pytest.mark.parametrize("family", ["mixtral", "olmoe", "qwen3_moe"])
def test_the_load_balance_loss(family, tmp_path):
    """transformers takes it over the tokens of all layers together, so it is compared where there is one layer; that
    of several is theirs in size only, which the weight that is read makes up for."""
    torch.manual_seed(0)
    settings = MODELS[family]().config.to_dict() | {"num_hidden_layers": 1, "router_aux_loss_coef": 0.3,
                                                    "output_router_logits": True}
    reference = AutoModelForCausalLM.from_config(type(MODELS[family]().config)(**settings)).eval()
    reference.save_pretrained(tmp_path)
    decoder = decoder_of(read_config(tmp_path), "config.json")
    network = decoder.build(parts())
    load_weights(network, decoder, tmp_path)
    batch = _batch()
    theirs = reference(batch.tensors["tokens"], labels=batch.tensors["tokens"])
    (0.3 * theirs.aux_loss).backward()
    _, _, terms = network(batch, torch.tensor(1.0))
    assert float(terms["aux_loss"]) / batch.num_targets == pytest.approx(0.3 * theirs.aux_loss.item(), rel=1e-5)
    scaled, _, _ = network(batch, torch.tensor(1 / batch.num_targets))
    with_loss = torch.autograd.grad(scaled, network.blocks[0].feed_forward.gate.weight)[0]
    without = replace(decoder, routing=replace(decoder.routing, aux_loss=0.0)).build(parts())
    without.load_state_dict(network.state_dict())
    plain = torch.autograd.grad(without(batch, torch.tensor(1 / batch.num_targets))[0],
                                without.blocks[0].feed_forward.gate.weight)[0]
    gate = next(value for name, value in reference.named_parameters() if name.endswith("mlp.gate.weight"))
    assert _error(with_loss - plain, gate.grad) <= 1e-3      # a difference of gradients, some hundred times as large
    three = replace(decoder, layers=3)
    assert decoder_of(settings_of(three), "config.json").routing.aux_loss == pytest.approx(0.3)
    assert settings_of(three)["router_aux_loss_coef"] == pytest.approx(0.9)


def test_round_trip_keeps_every_bit(reference, folder, tmp_path):
    decoder, network = _load(folder)
    written = tmp_path / "written"
    save_weights(network.state_dict(), decoder, written, companions(folder))

    _, again = _load(written)
    for name, parameter in network.state_dict().items():
        assert torch.equal(again.state_dict()[name], parameter), name

    theirs, loading = AutoModelForCausalLM.from_pretrained(written, attn_implementation="eager",
                                                           output_loading_info=True)
    assert not any(loading.values()), loading
    for name, parameter in reference.state_dict().items():
        assert torch.equal(theirs.state_dict()[name], parameter), name
    tokens = _batch().tensors["tokens"]
    with torch.no_grad():
        reference.set_attn_implementation("eager")
        assert torch.equal(theirs.eval()(tokens).logits, reference(tokens).logits)
