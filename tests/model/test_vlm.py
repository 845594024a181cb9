"""What a vision-language model promises beside its decoder."""

import copy
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from conftest import composed
from decoders import parts
from omegaconf import OmegaConf
from pictures import ORDERS, VISION, batch_of, error, small
from torch.utils.flop_counter import FlopCounterMode

from forge.attention.limits import head_width
from forge.attention.sdpa import SDPA
from forge.batch import Batch
from forge.checkpointing.full import Full
from forge.config import option_of
from forge.model.flops import convention
from forge.model.tower import cut, shuffle
from forge.model.vlm_network import placed
from forge.optimizer import Group
from forge.optimizer.groups import freeze
from forge.precision import Precision

UNIT = 2.0**-24
ALL = pytest.mark.parametrize("order", ORDERS)


def build(vlm, **options):
    torch.manual_seed(0)
    return vlm.build(parts(**options))


def gradients(network, batch):
    network.zero_grad()
    scaled, loss_sum, _ = network(batch, torch.tensor(1 / max(1, batch.num_targets)))
    scaled.backward()
    return {"loss": loss_sum} | {name: parameter.grad for name, parameter in network.named_parameters()}


@ALL
def test_it_trains_all_of_itself(order):
    found = gradients(build(small(order)), batch_of(small(order)))
    assert all(gradient is not None and gradient.norm() > 0 for gradient in found.values())


@ALL
def test_pictures_of_bytes_are_those_that_were_normalised(order):
    """And of another size they are resized with antialiasing before. The same operations: equal."""
    network, vlm = build(small(order)), small(order)
    for size in (8, 24):
        batch = batch_of(vlm, size=size)
        floats = batch.tensors["pictures"].permute(0, 3, 1, 2).float() / 255
        if size != 8:
            floats = F.interpolate(floats, (8, 8), mode="bilinear", antialias=True)
        mean, std = (torch.tensor(values).view(3, 1, 1) for values in (vlm.vision.mean, vlm.vision.std))
        made = replace(batch, tensors=batch.tensors | {"pictures": (floats - mean) / std})
        assert torch.equal(network.logits(batch), network.logits(made))


@ALL
def test_each_picture_is_seen_in_its_place_only(order):
    """Another second picture of the first row changes nothing before its first place, nor any other row."""
    vlm, network = small(order), build(small(order))
    batch = batch_of(vlm)
    other = replace(batch, tensors=batch.tensors | {"pictures": batch.tensors["pictures"].clone()})
    other.tensors["pictures"][1] += 1
    begin = 1 + vlm.vision.tokens_per_picture + 1
    same = network.logits(batch) == network.logits(other)
    assert same[0, :begin].all() and same[1:].all() and not same[0, begin:].all(-1).any()


@ALL
def test_rows_of_text_are_those_of_the_decoder_alone(order):
    """And the tower's gradients are there, all zeros: what ranks exchange is the same on all of them."""
    vlm = small(order)
    network, batch = build(vlm), batch_of(vlm, per_row=(0, 0))
    for tensors in (batch.tensors, {name: batch.tensors[name] for name in ("tokens", "targets")}):
        found = gradients(network, replace(batch, tensors=tensors))
        seen = {name: gradient for name, gradient in found.items() if name.startswith(("vision.", "projector."))}
        assert len(seen) > 20 and all(gradient is not None and not gradient.any() for gradient in seen.values())
    alone = network.decoder.build(parts())
    decoder = super(type(network.decoder), network.decoder)._drawn(parts())
    decoder.load_state_dict({name: value for name, value in network.state_dict().items()
                             if not name.startswith(("vision.", "projector."))})
    assert alone.state_dict().keys() == network.state_dict().keys()
    assert torch.equal(network.logits(batch), decoder.logits(batch))


def test_placed_is_a_loop():
    draw = torch.Generator().manual_seed(0)
    x, features = (torch.randn(shape, generator=draw, requires_grad=True) for shape in ((2, 5, 3), (4, 3)))
    places = torch.tensor([[False, True, True, False, False], [True, False, False, True, False]])
    wanted, rows = x.clone(), iter(features)
    for row, column in places.nonzero().tolist():
        wanted[row, column] = next(rows)
    assert torch.equal(placed(features, x, places), wanted)
    weight = torch.randn(2, 5, 3, generator=draw)
    ours, theirs = (torch.autograd.grad((y * weight).sum(), (x, features))
                    for y in (placed(features, x, places), wanted))
    assert all(map(torch.equal, ours, theirs))


@pytest.mark.parametrize("side", [6, 8])
def test_patches_and_a_matrix_are_a_convolution(side):
    """Sums of 27 products in another order. What fills no patch is left out."""
    draw = torch.Generator().manual_seed(0)
    pictures, weight = torch.randn(2, 3, side, side, generator=draw), torch.randn(5, 3, 3, 3, generator=draw)
    theirs = F.conv2d(pictures, weight, stride=3).flatten(2).transpose(1, 2)
    assert error(cut(pictures, 3) @ weight.flatten(1).T, theirs) <= 27 * UNIT


def test_siglip_sees_27_by_27_patches_of_384_pixels_and_says_what_it_does_not_see(monkeypatch, caplog):
    monkeypatch.setattr("forge.notes._said", set())
    caplog.set_level("WARNING", "forge")
    vlm = small("llava", vision=replace(ORDERS["llava"], image_size=384, patch_size=14, layers=1))
    config = SimpleNamespace(sequence_length=16, data=SimpleNamespace(conversation=None))
    assert not list(vlm.problems(config)) and vlm.vision.tokens_per_picture == 729
    assert build(vlm).logits(batch_of(vlm, per_row=(1,))).shape[1] == 736
    assert "the last 6 rows and columns of pixels fill no patch of 14" in caplog.text


def test_orders_of_the_shuffle():
    """By channel first it is F.pixel_unshuffle; by row first the same numbers in another order."""
    x = torch.arange(2 * 16 * 3.0).view(2, 16, 3)
    theirs = F.pixel_unshuffle(x.transpose(1, 2).view(2, 3, 4, 4), 2).flatten(2).transpose(1, 2)
    channels_first = shuffle(x, 2, channels_first=True)
    assert torch.equal(channels_first, theirs)
    rows_first = shuffle(x, 2, channels_first=False)
    assert torch.equal(rows_first.view(2, 4, 4, 3).transpose(2, 3).flatten(2), channels_first)
    assert not torch.equal(rows_first, channels_first)
    assert rows_first[0, 0].tolist() == [*x[0, 0], *x[0, 1], *x[0, 4], *x[0, 5]]


def test_packed_documents_see_their_own_pictures_only():
    """Two samples in one row, with positions of their own, as each alone: in float32, rounding apart."""
    vlm, network = small(), build(small(), attention=SDPA())
    one, other = (batch_of(vlm, per_row=(1,), seed=seed) for seed in (1, 2))
    length = one.tensors["tokens"].shape[1]
    both = {name: torch.cat([one.tensors[name], other.tensors[name]], dim=0 if name == "pictures" else 1)
            for name in one.tensors}
    both["documents"] = torch.arange(2, dtype=torch.int32).repeat_interleave(length).unsqueeze(0)
    both["positions"] = torch.arange(length).repeat(2).unsqueeze(0)
    logits = network.logits(Batch(both, 0, 0))
    for begin, alone in ((0, one), (length, other)):
        assert error(logits[:, begin:begin + length], network.logits(alone)) <= 64 * UNIT


@pytest.mark.parametrize("pattern", ["vision.*", "*", "blocks.*"])
def test_frozen_modules_are_not_trained_and_in_evaluation(pattern):
    network = build(small(dropout=0.5))
    if pattern == "*":
        with pytest.raises(Exception, match="freezes every parameter"):
            freeze(network, [Group(match="*", lr_scale=1.0, weight_decay=None, frozen=True)])
        return
    freeze(network, [Group(match=pattern, lr_scale=1.0, weight_decay=None, frozen=True)])
    network.train()
    frozen = network.vision if pattern == "vision.*" else network.blocks
    assert not any(module.training for module in frozen.modules())
    assert network.training and network.projector.training and network.embedding.training
    scaled, _, _ = network(batch_of(small()), torch.tensor(1.0))
    scaled.backward()
    assert all(parameter.grad is None for parameter in frozen.parameters())
    assert all(parameter.grad is not None for parameter in network.projector.parameters())
    network.eval()
    assert not network.projector.training


def test_blocks_of_the_tower_are_recomputed_and_compiled():
    network = build(small())
    assert network.block_lists() == [network.vision.blocks, network.blocks]
    plain, again = (gradients(one, batch_of(small())) for one in (network, Full()(copy.deepcopy(network))))
    assert all(torch.equal(plain[name], again[name]) for name in plain)


def test_compute_is_one_graph():
    """Traced whole, for batches with pictures and without, and run as it was traced: bit for bit."""
    vision = replace(ORDERS["internvl"], layers=1)          # each block is traced anew
    network = build(small(layers=1, vision=vision), attention=SDPA())
    batches = [batch_of(small("internvl"), per_row=rows) for rows in ((2, 1, 0), (0, 0))]
    plain = [[network.logits(batch), *gradients(network, batch).values()] for batch in batches]
    network.compute = torch.compile(network.compute, fullgraph=True, backend="eager")
    for batch, wanted in zip(batches, plain, strict=True):
        assert all(map(torch.equal, [network.logits(batch), *gradients(network, batch).values()], wanted))


@pytest.mark.parametrize("whole", [False, True])
def test_no_number_of_pictures_is_compiled_anew(whole):
    """With `dynamic=false`, as in conf/compile: one is a number of its own, and more are any number."""
    graphs = []

    def counted(graph, inputs):
        graphs.append(graph)
        return graph

    torch._dynamo.reset()
    vlm = small(layers=1, vision=replace(ORDERS["idefics"], layers=2))
    network = build(vlm, attention=SDPA())
    if whole:
        network.compute = torch.compile(network.compute, dynamic=False, backend=counted)
    else:
        for block in network.vision.blocks:
            block.compile(dynamic=False, backend=counted)
    for number in range(7):
        text = 60 - number * (vlm.vision.tokens_per_picture + 1)        # rows of one length
        gradients(network, batch_of(vlm, per_row=(number, 0), text=text))
        if number == 2:
            after_two = len(graphs)
    assert 0 < after_two == len(graphs)


@pytest.mark.parametrize("words", [["bf16"], ["bf16", "precision.scope=blocks"], ["bf16_pure"], ["bf16_master"],
                                   ["fp8"]], ids=str)
def test_every_precision_computes_it(words):
    """Within the rounding of bfloat16, 2**-8 of a loss that is a mean of terms near it."""
    for order in ("eagle", "internvl"):
        vlm = small(order)
        precision = option_of("precision", Precision, OmegaConf.to_container(
            composed(f"precision={words[0]}", *words[1:]).precision))
        plain, network = build(vlm), precision.convert(build(vlm, attention=SDPA()))
        batch = batch_of(vlm, size=8)
        with precision.autocast(torch.device("cpu")):
            found = gradients(network, batch)
        assert all(torch.isfinite(gradient).all() for gradient in found.values())
        assert error(found["loss"].float(), gradients(plain, batch)["loss"]) <= 2.0**-8


def test_attention_kernels_take_the_towers_heads_or_say_so():
    wide = small(vision=replace(VISION, width=24, heads=2))
    config = SimpleNamespace(model=wide, hardware=SimpleNamespace(device="cuda"))
    assert "model.vision.width over heads is 12" in "".join(head_width("cudnn", config, most=128, multiple=8))
    assert not list(head_width("cudnn", SimpleNamespace(model=small(), hardware=config.hardware), 128, 8))


@ALL
def test_the_operations_of_a_picture_are_what_a_counter_counts(order):
    """Forward, where the counter sees the products that the formula counts, and no gradient of pixels."""
    vlm, network = small(order), build(small(order))
    counts = []
    for pictures in (1, 2):
        batch = batch_of(vlm, per_row=(pictures,), text=40 - pictures * (vlm.vision.tokens_per_picture + 1))
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            network.logits(batch)
        counts.append(counter.get_total_flops())
    forward = network.forward_flops()
    assert counts[1] - counts[0] == pytest.approx(forward.picture, rel=1e-6)
    assert network.flops_per_token(40) - convention(forward, 40) == pytest.approx(3 * forward.picture / 40)


def test_weights_begin_by_the_depth_they_are_added_at():
    network = build(small(vision=replace(VISION, layers=8, width=48)))
    for blocks, layers in ((network.vision.blocks, 8), (network.blocks, 2)):
        weights = torch.cat([block.attention.out.weight.flatten() for block in blocks])
        assert weights.std().item() == pytest.approx(0.02 / (2 * layers) ** 0.5, rel=0.1)


@pytest.mark.parametrize("changes, said", [
    ({"picture_token": 61}, "model.picture_token=61 is no token of model.vocab_size=61"),
    ({"vision": replace(VISION, patch_size=9)}, "model.vision.patch_size=9 is more than model.vision.image_size=8"),
    ({"vision": replace(VISION, image_size=7)}, "model.vision.shuffle=2 does not divide the 3 patches"),
    ({"vision": replace(VISION, shuffle=3)}, "model.vision.shuffle=3 does not divide the 4 patches"),
    ({"vision": replace(VISION, heads=5)}, "model.vision.width=24 is no multiple of model.vision.heads=5"),
    ({"vision": replace(VISION, order="llava")}, "model.vision.order=llava joins no neighbours"),
    ({"vision": replace(VISION, std=[0.5, 0.0, 0.5])}, "model.vision.std=.* three numbers"),
    ({"vision": replace(VISION, layers=0)}, "model.vision.layers=0: at least 1"),
    ({"vision": replace(VISION, family="llava"), "weights": "nowhere"}, "nowhere is not a Hugging Face folder")])
def test_bad_settings_are_said(changes, said):
    config = SimpleNamespace(sequence_length=16, data=SimpleNamespace(conversation=None))
    with pytest.raises(AssertionError, match=said):
        raise AssertionError("\n".join(small(**changes).problems(config)))


def test_augmented_pictures_of_another_size_are_refused():
    batch = batch_of(small())
    wrong = replace(batch, tensors=batch.tensors | {"pictures": torch.zeros(3, 3, 16, 16)})
    with pytest.raises(Exception, match=r"shape \[3, 16, 16\], and model.vision.image_size=8"):
        build(small()).logits(wrong)


