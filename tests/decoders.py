"""Decoders for tests: those of conf/model, and small ones of every family."""

from dataclasses import replace

from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from routings import routing

from forge.attention.eager import Eager
from forge.config import conf_dir
from forge.loss.plain import Plain
from forge.model import Parts
from forge.model.decoder import Decoder, DenseFirst, Latent
from forge.model.positions import Llama3Scaling, Rotary
from forge.model.vlm import VLM
from forge.moe_router.loop import Loop
from forge.operators.native import Native
from forge.schema import structure


def preset(name: str, *overrides: str) -> Decoder:
    """The option conf/model/<name>.yaml with a sequence length of 256."""
    with initialize_config_dir(conf_dir(), version_base="1.3"):
        composed = compose(overrides=[f"+model={name}", "+sequence_length=256", *overrides])
    values = OmegaConf.to_container(composed, resolve=True)["model"]
    schema = {f"{kind.__module__}.{kind.__name__}": kind for kind in (Decoder, VLM)}[values.pop("_target_")]
    mistakes: list[str] = []
    decoder = structure(schema, values, "model", mistakes)
    assert decoder is not None, mistakes
    return decoder


def parts(**changes) -> Parts:
    return Parts(**{"attention": Eager(), "operators": Native(), "moe_router": Loop(), "loss": Plain(1), **changes})


LLAMA = Decoder(
    vocab_size=61, width=32, layers=2, heads=4, kv_heads=2, head_width=8, hidden=48, norm="rms", eps=1e-5,
    rotary=Rotary(10000.0, False, None), max_length=64, activation="swiglu", biases=False, fused_qkv=True,
    qk_norm="none", clip_qkv=None, attention_gate="none",
    window=None, latent=None, tied=False, dropout=0.0, init_std=0.02, routing=None,
    dense_first=None, family="llama", weights=None)
ROUTING = routing(num_experts=5, normalize=True)
SIGMOID = routing(num_experts=6, top_k=3, score="sigmoid", normalize=True, scale=2.5, num_groups=3, top_groups=2,
                  shared_hidden=40)
SMALL = {
    "gpt2": replace(LLAMA, kv_heads=4, hidden=128, norm="layer", rotary=None, activation="gelu_tanh", biases=True,
                    tied=True, family="gpt2"),
    "llama": replace(LLAMA, rotary=Rotary(10000.0, False, Llama3Scaling(8.0, 1.0, 4.0, 16))),
    "llama_tied_biased": replace(LLAMA, tied=True, biases=True),
    "qwen2": replace(LLAMA, biases="qkv", family="qwen2"),
    "qwen3": replace(LLAMA, head_width=12, qk_norm="head", family="qwen3"),
    "mixtral": replace(LLAMA, routing=ROUTING, family="mixtral"),
    "mixtral_window": replace(LLAMA, routing=ROUTING, window=5, family="mixtral"),
    "olmoe": replace(LLAMA, routing=replace(ROUTING, normalize=False), qk_norm="width", clip_qkv=0.1, family="olmoe"),
    "qwen3_moe": replace(LLAMA, head_width=12, routing=ROUTING, qk_norm="head", family="qwen3_moe"),
    "dots1": replace(LLAMA, hidden=20, routing=SIGMOID, dense_first=DenseFirst(1, 48), qk_norm="head", family="dots1"),
    "deepseek_v3": replace(LLAMA, kv_heads=4, head_width=12, rotary=Rotary(10000.0, True, None), hidden=20,
                           latent=Latent(24, 20, 4, 8, 1e-6), routing=SIGMOID, dense_first=DenseFirst(1, 48),
                           family="deepseek_v3"),
}
# And those that no family of Hugging Face has a layout for.
EVERY = SMALL | {
    "gated": replace(LLAMA, attention_gate="head"),
    "gated_each": replace(LLAMA, attention_gate="element", fused_qkv=False),
}
