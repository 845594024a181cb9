"""What the settings of a decoder promise."""

import copy
import re
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from decoders import EVERY, LLAMA, ROUTING, parts, preset
from torch.utils.checkpoint import checkpoint

from forge.attention.cudnn import CuDNN
from forge.attention.eager_stored import EagerStored
from forge.attention.flash import Flash
from forge.attention.flex import Flex
from forge.attention.sdpa import SDPA
from forge.batch import IGNORED, Batch
from forge.errors import ConfigError
from forge.loss.chunked import Chunked
from forge.model.decoder import DenseFirst, Latent
from forge.model.latent import LatentAttention
from forge.model.positions import Rotary, YaRN
from forge.moe_router.sorted import Sorted
from forge.passes.turns import seed

ALL = pytest.mark.parametrize("name", EVERY)


def _build(decoder, **options):
    torch.manual_seed(0)
    return decoder.build(parts(**options))


def _batch(rows=3, length=16, seed=1, **tensors):
    tokens = torch.randint(61, (rows, length + 1), generator=torch.Generator().manual_seed(seed))
    targets = tokens[:, 1:].clone()
    targets[0, :5] = IGNORED
    return Batch({"tokens": tokens[:, :-1], "targets": targets, **tensors}, int((targets != IGNORED).sum()), seed=7)


def _step(network, batch, scale=None):
    seed(torch.device("cpu"), batch.seed)       # as the passes do
    network.zero_grad()
    scaled, loss_sum, terms = network(batch, torch.tensor(1 / batch.num_targets) if scale is None else scale)
    scaled.backward()
    return [scaled.detach(), loss_sum, *terms.values(), *(p.grad.clone() for p in network.parameters())]


@pytest.mark.parametrize("name, millions", [
    ("moe_tiny", 1.905792), ("gpt2_124m", 124.439808), ("gpt2_350m", 354.823168), ("gpt2_774m", 774.030080),
    ("gpt2_1558m", 1557.611200), ("llama_160m", 160.058112), ("llama_1b", 1235.814400), ("llama_8b", 8030.261248),
    ("mixtral_8x7b", 46702.792704), ("olmoe_1b_7b", 6919.161856), ("qwen3_30b_a3b", 30532.122624),
    ("moonlight_16b_a3b", 15960.108544), ("dots1_142b_a14b", 142774.373888), ("deepseek_v3", 671026.404352),
    ("vlm_tiny", 0.983456), ("vlm_222m", 222.082176), ("vlm_460m", 460.113984), ("vlm_gr00t", 1542.630128)])
def test_presets_have_as_many_weights_as_the_released_models(name, millions):
    with torch.device("meta"):
        network = preset(name).build(parts(moe_router=Sorted()))
    assert sum(parameter.numel() for parameter in network.parameters()) == round(millions * 1e6)


def test_vocabulary_can_be_padded():
    assert preset("gpt2_124m", "model.vocab_size=50304").vocab_size == 50304


@ALL
def test_contract(name):
    network = _build(EVERY[name])
    batch = _batch()
    scaled, loss_sum, terms = network(batch, torch.tensor(0.5))
    routed = EVERY[name].routing is not None
    assert list(terms) == (["expert_choices", "expert_load"] if routed else [])
    assert loss_sum.dtype == torch.float32 and not loss_sum.requires_grad
    assert torch.equal(scaled, loss_sum * 0.5)
    assert network.logits(batch).shape == (3, 16, 61)
    if routed:
        dense, routing = EVERY[name].dense_layers, EVERY[name].routing
        assert terms["expert_load"].shape == (2, routing.num_experts)
        assert (terms["expert_choices"].sum(1)[dense:] == batch.num_targets * routing.top_k).all()
        assert (terms["expert_load"].sum(1)[dense:] == 3 * 16 * routing.top_k).all()        # all are computed
        assert (terms["expert_load"][:dense] == 0).all()
    scaled.backward()
    assert all(parameter.grad is not None for parameter in network.parameters())


def test_auxiliary_losses_are_scaled_with_the_loss_and_reported():
    decoder = replace(EVERY["mixtral"], routing=replace(ROUTING, aux_loss=0.1, z_loss=0.01))
    network, own = _build(decoder), []
    for block in network.blocks:
        block.feed_forward.register_forward_hook(lambda module, inputs, outputs: own.append(outputs[1].detach()))
    scaled, loss_sum, terms = network(_batch(), torch.tensor(0.5))
    assert len(own) == 2 and min(own) > 0 and torch.equal(terms["aux_loss"], sum(own))
    assert torch.allclose(scaled, (loss_sum + terms["aux_loss"]) * 0.5)


@ALL
def test_two_micro_batches_of_unequal_counts_add_up_to_one_batch(name):
    """Tolerance: sums over twice the rows in another order, about rows * length * u of the gradient; u = 2**-24."""
    decoder = EVERY[name]
    if decoder.routing is not None:
        decoder = replace(decoder, routing=replace(decoder.routing, aux_loss=0.1, aux_scope="sequence", z_loss=0.01))
    network = _build(decoder)
    whole = _batch(rows=4)
    halves = [Batch({key: value[rows] for key, value in whole.tensors.items()}, 0, 0)
              for rows in (slice(0, 1), slice(1, 4))]
    one = _step(network, whole)
    network.zero_grad()
    scale = torch.tensor(1 / whole.num_targets)
    for half in halves:
        network(half, scale)[0].backward()
    for grad, parameter in zip(one[-len(list(network.parameters())):], network.parameters(), strict=True):
        assert (grad - parameter.grad).norm() <= 8 * 64 * 2.0**-24 * grad.norm()


@ALL
def test_same_seed_same_weights_whatever_the_options(name):
    one, other = _build(EVERY[name]), _build(EVERY[name], moe_router=Sorted(), loss=Chunked(8, 1))
    assert one.state_dict().keys() == other.state_dict().keys()
    for key, value in one.state_dict().items():
        assert torch.equal(value, other.state_dict()[key])


@ALL
def test_three_products_are_the_fused_one(name):
    """Tolerance: the same sums of at most 48 float32 terms, cut otherwise, through two blocks and back."""
    fused, apart = _build(EVERY[name]), _build(replace(EVERY[name], fused_qkv=False))
    assert [key for key, _ in fused.named_parameters()] == [key for key, _ in apart.named_parameters()]
    products = []
    apart.blocks[0].attention.qkv.register_forward_hook(lambda *_: products.append("one"))
    for one, other in zip(_step(fused, _batch()), _step(apart, _batch()), strict=True):
        assert (one - other).norm() <= 4 * 48 * 2.0**-24 * one.norm()
    assert products == []


@pytest.mark.parametrize("option", [SDPA(), Flash(), CuDNN(), Flex(), EagerStored()], ids=lambda o: type(o).__name__)
@pytest.mark.parametrize("documents", [False, True])
def test_values_narrower_than_keys_are_what_eager_computes_with_every_attention(option, documents):
    """Padded with zeros where an option takes one width only, as fused kernels do. Tolerance: as above."""
    decoder = EVERY["deepseek_v3"]
    more = {"documents": torch.tensor([[0] * 5 + [1] * 11] * 3, dtype=torch.int32)} if documents else {}
    plain, other = _build(decoder), _build(decoder, attention=option)
    for one, two in zip(_step(plain, _batch(**more)), _step(other, _batch(**more)), strict=True):
        assert (one - two).norm() <= 4 * 48 * 2.0**-24 * one.norm()


def test_latent_attention_is_attention_with_its_matrices_multiplied_out():
    """Without norms and positions, one latent more is only a product more: keys and values straight from the input."""
    decoder = replace(EVERY["deepseek_v3"], width=16, latent=replace(EVERY["deepseek_v3"].latent, q_rank=None))
    module = LatentAttention(decoder, parts(operators=SimpleNamespace(norm=lambda *_: torch.nn.Identity())))
    x, still = torch.randn(2, 9, 16), torch.stack([torch.ones(1, 1, 9, 2), torch.zeros(1, 1, 9, 2)])
    causal = torch.ones(9, 9, dtype=torch.bool).tril()[None, None]
    q_rows, latent_rows, key_rows = module.qkv.weight.split(module.sizes)
    up = (module.kv_up.weight @ latent_rows).view(4, 16, 16)
    q = (x @ q_rows.T).view(2, 9, 4, 12).transpose(1, 2)
    k = torch.cat([up[:, :8], key_rows.expand(4, 4, 16)[:, [0, 2, 1, 3]]], dim=1)      # first the even, then the odd
    k, v = (torch.einsum("btw,hnw->bhtn", x, rows) for rows in (k, up[:, 8:]))
    q = q[..., [*range(8), 8, 10, 9, 11]]
    scores = (q @ k.transpose(-2, -1) * 12**-0.5).masked_fill(~causal, float("-inf"))
    expected = (scores.softmax(-1) @ v).transpose(1, 2).flatten(2) @ module.out.weight.T
    assert torch.allclose(module(x, still, causal), expected, atol=1e-6)


def test_weights_are_drawn_as_gpt2_draws_them():
    network = _build(replace(EVERY["gpt2"], width=128, hidden=512, layers=8, head_width=32))
    deviations = {name: p.std().item() for name, p in network.named_parameters() if p.dim() == 2}
    for name, deviation in deviations.items():
        added = name.endswith(("attention.out.weight", "down.weight"))
        assert deviation == pytest.approx(0.02 / (4 if added else 1), rel=0.05), name
    for name, parameter in network.named_parameters():
        if parameter.dim() == 1:
            assert (parameter == (1 if name.endswith("norm.weight") else 0)).all(), name


@ALL
def test_checkpointed_blocks_compute_the_same_bits(name):
    network = _build(replace(EVERY[name], dropout=0.1))
    plain = _step(network, _batch())
    for blocks in network.block_lists():
        for block in blocks:
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    assert all(map(torch.equal, plain, _step(network, _batch())))


@pytest.mark.parametrize("name, options", [("gpt2", {}), ("llama", {"loss": Chunked(20, 1)}),
                                           ("qwen3_moe", {"moe_router": Sorted()})])
def test_compute_can_be_traced_as_one_graph(name, options):
    torch._dynamo.reset()       # what other tests compiled counts against the limit of recompilations
    network = _build(EVERY[name], **options)
    plain = _step(network, _batch())
    network.compute = torch.compile(network.compute, fullgraph=True, backend="aot_eager")
    for one, other in zip(plain, _step(network, _batch()), strict=True):
        assert torch.allclose(one, other, rtol=1e-4, atol=1e-6)


def test_dropout_is_a_function_of_the_batch():
    network = _build(replace(EVERY["gpt2"], dropout=0.3))
    one = _step(network, _batch())
    torch.rand(5)
    again, other = _step(network, _batch()), _step(network, replace(_batch(), seed=8))
    assert all(map(torch.equal, one, again)) and not torch.equal(one[0], other[0])
    network.eval()
    assert torch.equal(network.logits(_batch()), network.logits(replace(_batch(), seed=8)))


@ALL
def test_documents_in_one_row_are_computed_as_if_alone(name):
    network = _build(EVERY[name])
    alone = [_batch(rows=1, length=length, seed=length).tensors["tokens"] for length in (5, 9)]
    packed = Batch({"tokens": torch.cat(alone, dim=1),
                    "documents": torch.tensor([[0] * 5 + [1] * 9], dtype=torch.int32),
                    "positions": torch.cat([torch.arange(5), torch.arange(9)]).unsqueeze(0)}, 0, 0)
    apart = torch.cat([network.logits(Batch({"tokens": tokens}, 0, 0)) for tokens in alone], dim=1)
    together = network.logits(packed)
    assert (apart - together).norm() <= 1e-5 * apart.norm()
    del packed.tensors["documents"]
    assert (apart - network.logits(packed)).norm() > 1e-3 * apart.norm()


def test_no_token_sees_the_next():
    for decoder in EVERY.values():
        network = _build(decoder)
        tokens = _batch().tensors["tokens"]
        changed = tokens.clone()
        changed[:, 9] = (changed[:, 9] + 1) % 61
        one, other = (network.logits(Batch({"tokens": t}, 0, 0)) for t in (tokens, changed))
        assert torch.allclose(one[:, :9], other[:, :9], atol=1e-6)
        assert not torch.allclose(one[:, 9:], other[:, 9:], atol=1e-6)


def test_rotary_frequencies_stay_exact_in_a_cast_model():
    network = _build(EVERY["llama"])
    exact = network.rotary.frequencies.clone()
    assert torch.equal(copy.deepcopy(network).to(torch.bfloat16).rotary.frequencies, exact)
    assert not any("frequencies" in name for name in network.state_dict())


@ALL
@pytest.mark.parametrize("mode", ["parameters", "autocast", "autocast_residual"])
def test_bfloat16_trains(name, mode):
    network = _build(EVERY[name])
    exact = network(_batch(), torch.tensor(1.0))[1]
    if mode == "parameters":
        network.to(torch.bfloat16)
    if mode == "autocast_residual":
        network.residual_dtype = torch.bfloat16
    with torch.autocast("cpu", torch.bfloat16, enabled=mode != "parameters"):
        scaled, loss_sum, _ = network(_batch(), torch.tensor(1.0))
    scaled.backward()
    assert loss_sum.dtype == torch.float32 and torch.allclose(loss_sum, exact, rtol=0.01)
    assert all(parameter.grad.isfinite().all() for parameter in network.parameters())


def test_flops_per_token_follow_the_convention():
    """nanoGPT counts 6 N + 12 L H Q T with every weight but the positions; norms and biases are what differs."""
    with torch.device("meta"):
        network = preset("gpt2_124m").build(parts())
    convention = 6 * (124_439_808 - 1024 * 768) + 12 * 12 * 768 * 1024
    assert network.flops_per_token(1024) == pytest.approx(convention, rel=1e-3)
    with torch.device("meta"):
        mixture = preset("mixtral_8x7b").build(parts())
    assert mixture.flops_per_token(0) == pytest.approx(6 * (12.88e9 - 32000 * 4096), rel=1e-3)    # 12.9B active


def _latent(**changes):
    return replace(EVERY["deepseek_v3"], **changes)


def _problems(decoder):
    return list(decoder.problems(SimpleNamespace(sequence_length=16)))


def _stretched(**changes):
    scaling = YaRN(**{"factor": 8.0, "original_max_length": 64, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": True,
                      "amplitude": 1.2, "mscale_all_dim": 0.0} | changes)
    return replace(LLAMA, rotary=Rotary(10000.0, False, scaling))


@pytest.mark.parametrize("decoder, words", [
    (replace(LLAMA, kv_heads=3), "model.heads=4 is no multiple of model.kv_heads=3"),
    (replace(LLAMA, head_width=7), "model.head_width=7 is odd"),
    (replace(LLAMA, layers=0), "model.layers=0: at least 1"),
    (replace(LLAMA, window=0), "model.window=0"),
    (replace(LLAMA, dropout=1.0), "model.dropout=1.0"),
    (replace(EVERY["gpt2"], max_length=8), "sequence_length=16 is longer than model.max_length=8"),
    (replace(LLAMA, routing=replace(ROUTING, top_k=6)), "model.routing.top_k=6 does not fit"),
    (replace(LLAMA, routing=ROUTING, activation="gelu"), "experts compute swiglu"),
    (replace(LLAMA, dense_first=DenseFirst(1, 8)), "set model.dense_first=null"),
    (replace(EVERY["dots1"], dense_first=DenseFirst(2, 8)), "model.dense_first.layers=2: between 1 and"),
    (replace(EVERY["dots1"], dense_first=DenseFirst(1, 0)), "model.dense_first.hidden=0"),
    (_latent(kv_heads=2), "model.kv_heads=2: .* set model.kv_heads=4"),
    (_latent(rotary=None), "set model.rotary.base"),
    (_latent(qk_norm="head"), "model.qk_norm=head: model.latent knows none. Set model.qk_norm=none"),
    (_latent(clip_qkv=1.0), "model.clip_qkv=1.0: .* Set model.clip_qkv=null"),
    (_latent(biases=True), "model.biases=true: .* Set model.biases=false"),
    (_latent(latent=Latent(None, 0, 4, 8, 1e-6)), "model.latent.kv_rank=0"),
    (_latent(latent=Latent(0, 8, 4, 8, 1e-6)), "model.latent.q_rank=0"),
    (_latent(latent=Latent(8, 8, 3, 8, 1e-6)), "model.latent.rotary_width=3 is odd"),
    (_latent(latent=Latent(8, 8, 12, 8, 1e-6)), "model.latent.rotary_width=12 leaves nothing of model.head_width=12"),
    (_latent(latent=Latent(8, 8, 4, 13, 1e-6)), "model.latent.value_width=13 is more than model.head_width=12"),
    (_latent(latent=Latent(8, 8, 4, 8, 0.0)), "model.latent.eps=0.0"),
    (_stretched(factor=0.5), "model.rotary.scaling.factor=0.5"),
    (_stretched(beta_slow=40.0), "scaling.beta_slow=40 is"),
    (_stretched(original_max_length=0), "scaling.original_max_length=0"), (_stretched(amplitude=0.0), "amplitude=0:"),
    (_stretched(mscale_all_dim=1.0), "model.rotary.scaling.mscale_all_dim=1 is of model.latent, which is null"),
    (replace(LLAMA, weights="/nowhere"), "model.weights=/nowhere: /nowhere is not a Hugging Face folder")])
def test_problems_name_setting_value_and_mend(decoder, words):
    (problem,) = _problems(decoder)
    assert re.search(words, problem)


@pytest.mark.parametrize("name", ["moe_tiny", "gpt2_124m", "llama_8b", "mixtral_8x7b", "olmoe_1b_7b", "qwen3_30b_a3b",
                                  "moonlight_16b_a3b", "dots1_142b_a14b", "deepseek_v3"])
def test_presets_have_no_problems(name):
    assert _problems(preset(name)) == []


def test_a_row_longer_than_learned_positions_is_refused():
    with pytest.raises(ConfigError, match=r"65 tokens is longer than model.max_length=64"):
        _build(EVERY["gpt2"]).logits(_batch(rows=1, length=65))
