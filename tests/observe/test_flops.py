"""The formulas against a counter of what is really computed, and what is made of them.

torch's FlopCounterMode counts operators as they run. It never halves causal attention, and it does not know all
operators: those of UNCOUNTED it takes for nothing, without a word. So the models here compute attention by eager
products and experts by a loop, which it sees whole; what fused kernels execute is compared with the counter's own
formula for them.
"""

import re
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from conftest import train_here
from decoders import EVERY, ROUTING, parts
from torch.utils.flop_counter import FlopCounterMode, flop_registry, sdpa_backward_flop_count, sdpa_flop_count

import forge.operators.epilogues  # noqa: F401     # defines the operators of EPILOGUES
from forge import notes
from forge.attention.cudnn import CuDNN
from forge.attention.eager import Eager
from forge.attention.flash import Flash
from forge.attention.flex import Flex
from forge.attention.sdpa import SDPA
from forge.batch import Batch
from forge.checkpointing.full import Full
from forge.checkpointing.none import KeepAll
from forge.checkpointing.selective import Selective
from forge.compile.none import NotCompiled
from forge.compile.whole import Whole
from forge.loss.chunked import Chunked
from forge.loss.plain import Plain
from forge.model.flops import convention, exact, executed, forward_of, mean_keys
from forge.moe_router.loop import Loop
from forge.observe.flops import PEAK_TFLOPS, execution, peak_flops, possible
from forge.observe.seen import Seen
from forge.operators.fused import Fused
from forge.operators.native import Native
from forge.optimizer import Group

ROWS, LENGTH = 3, 16
CLOSE = 1e-6            # every product is counted on both sides, so only float64 rounding is left; 2 % is the promise
EPILOGUES = {            # forge's own products, which a counter sees as one operator each
    torch.ops.forge.gelu_product: lambda x, weight, bias, out_shape=None, **_: 2 * x[0] * x[1] * weight[0],
    torch.ops.forge.gelu_gradient_product: lambda gradient, weight, pre, out_shape=None, **_:
        2 * gradient[0] * gradient[1] * weight[1]}
UNCOUNTED = ["aten._grouped_mm", "aten._scaled_dot_product_flash_attention_for_cpu", "forge.one_by_one"]


def batch():
    tokens = torch.randint(61, (ROWS, LENGTH + 1), generator=torch.Generator().manual_seed(0))
    return Batch({"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}, ROWS * LENGTH, seed=1)


def counted(decoder, checkpointing=None, **options) -> float:
    """Operations a token of one forward and backward pass, as the counter sees them."""
    torch.manual_seed(0)
    network = (checkpointing or KeepAll())(decoder.build(parts(**options)))
    with FlopCounterMode(display=False, custom_mapping=EPILOGUES) as counter:
        network(batch(), torch.tensor(1.0))[0].backward()
    return counter.get_total_flops() / (ROWS * LENGTH)


def config(decoder, **changes):
    return SimpleNamespace(**{"attention": Eager(), "checkpointing": KeepAll(), "loss": Plain(1), "moe_router": Loop(),
                              "operators": Native(),
                              "optimizer": SimpleNamespace(groups=[]), "model": decoder,
                              "compile": NotCompiled(), **changes})


def seen(window=None, batches=None):
    made = Seen(window)
    for one in batches or [batch()]:
        assert made(one) is one
    return made


def predicted(decoder, **changes) -> float:
    forward = forward_of(decoder)
    how = execution(config(decoder, **changes), forward, seen(decoder.window))
    assert how is not None
    return executed(forward, how)


@pytest.mark.parametrize("name", EVERY)
def test_the_convention_is_what_the_counter_counts(name):
    """A whole table of scores, causal or in a window, as the counter has it."""
    decoder = EVERY[name]
    assert counted(decoder) == pytest.approx(convention(forward_of(decoder), LENGTH), rel=CLOSE)
    assert predicted(decoder) == pytest.approx(counted(decoder), rel=CLOSE)
    torch.manual_seed(0)
    assert decoder.build(parts()).flops_per_token(LENGTH) == convention(forward_of(decoder), LENGTH)


def test_the_convention_is_6_n_and_12_l_d_s():
    decoder = EVERY["gpt2"]
    weights = decoder.layers * (4 * 32 * 32 + 2 * 32 * 128) + 32 * 61
    assert convention(forward_of(decoder), 100) == 6 * weights + 12 * decoder.layers * 32 * 100


def test_each_chosen_expert_is_counted_and_no_other():
    base = forward_of(EVERY["mixtral"])
    more = forward_of(replace(EVERY["mixtral"], routing=replace(ROUTING, top_k=4, num_experts=10)))
    assert (more.up, more.down, more.gate) == (2 * base.up, 2 * base.down, 2 * base.gate)
    assert (more.projections, more.head) == (base.projections, base.head)


@pytest.mark.parametrize("name", ["gpt2", "llama", "mixtral", "deepseek_v3"])
@pytest.mark.parametrize("checkpointing", [
    Full(), Selective(1, []), Selective(2, []), Selective(1, ["matmul"]), Selective(1, ["attention"]),
    Selective(1, ["matmul", "attention"])], ids=str)
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_what_checkpointing_repeats_is_what_the_counter_counts(name, checkpointing, dropout):
    decoder = replace(EVERY[name], dropout=dropout, layers=3)
    found = counted(decoder, checkpointing)
    if name == "deepseek_v3" and checkpointing.repeats(3).blocks < 3:
        how = execution(config(decoder, checkpointing=checkpointing), forward_of(decoder), seen())
        assert how is None          # its blocks cost differently
        return
    assert predicted(decoder, checkpointing=checkpointing) == pytest.approx(found, rel=CLOSE)
    repeats = checkpointing.repeats(3).kept != ("matmul",) and checkpointing.repeats(3).kept != ("matmul", "attention")
    assert (found > 1.05 * counted(decoder)) == repeats


@pytest.mark.parametrize("checkpointing", [KeepAll(), Full(), Selective(1, []), Selective(1, ["matmul"])], ids=str)
def test_a_feed_forward_with_epilogues_repeats_its_last_product(checkpointing):
    found = counted(EVERY["gpt2"], checkpointing, operators=Fused())
    predict = partial(predicted, EVERY["gpt2"], checkpointing=checkpointing)
    assert predict(operators=Fused()) == pytest.approx(found, rel=CLOSE)
    repeats = not isinstance(checkpointing, KeepAll) and not checkpointing.repeats(2).kept
    assert (found > predict()) == repeats


def test_the_chunked_head_is_computed_once_more():
    decoder = EVERY["llama"]
    found = counted(decoder, loss=Chunked(20, 1))
    assert predicted(decoder, loss=Chunked(20, 1)) == pytest.approx(found, rel=CLOSE)
    assert found - counted(decoder) == pytest.approx(2 * 32 * 61, rel=CLOSE)


def test_fused_kernels_execute_seven_products_for_six():
    """By the counter's formula for flash, efficient and cuDNN attention: 2 products forward, 5 backward."""
    shape = (2, 4, 64, 8)
    forward = sdpa_flop_count(shape, shape, shape)
    assert (forward + sdpa_backward_flop_count(shape, shape, shape, shape)) / forward == 7 / 2
    for option in (SDPA(), Flash(), CuDNN(), Flex()):
        decoder = EVERY["gpt2"]
        forward = forward_of(decoder)
        more = predicted(decoder, attention=option) - 3 * (forward.in_blocks + forward.head)
        assert more == pytest.approx(7 / 6 * 3 * forward.attention_per_key * (LENGTH + 1) / 2)


def test_values_narrower_than_keys_are_padded_for_fused_kernels_and_counted_so():
    """Scores again in backward: one product of keys' width for two of theirs and two of values', forward and back."""
    decoder = EVERY["deepseek_v3"]
    forward = forward_of(decoder)
    assert forward.values_per_key / forward.scores_per_key == 8 / 12
    products = 3 * (forward.in_blocks + forward.head)
    fused = predicted(decoder, attention=SDPA()) - products
    assert fused == pytest.approx(7 * forward.scores_per_key * (LENGTH + 1) / 2)
    how = execution(config(decoder, attention=SDPA()), forward, seen())
    narrow = executed(forward, replace(how, narrow_values=True)) - products
    assert narrow == pytest.approx((4 + 3 * 8 / 12) * forward.scores_per_key * (LENGTH + 1) / 2)


def test_dense_first_blocks_and_shared_experts_are_counted():
    decoder = replace(EVERY["dots1"], layers=3)
    forward, dense, shared = (forward_of(one) for one in (
        decoder, replace(decoder, dense_first=replace(decoder.dense_first, hidden=49)),
        replace(decoder, routing=replace(decoder.routing, shared_hidden=41))))
    assert (dense.up - forward.up, dense.down - forward.down) == (2 * 2 * 32, 2 * 32)
    assert (shared.up - forward.up, shared.down - forward.down) == (2 * 2 * 2 * 32, 2 * 2 * 32)
    assert forward.gate == 2 * 2 * 32 * 6


@pytest.mark.parametrize(("option", "keys"), [(Eager(), LENGTH), (SDPA(), LENGTH), (Flex(), mean_keys(LENGTH, 5))])
def test_a_window_saves_work_only_where_a_kernel_skips_it(option, keys):
    decoder = replace(EVERY["llama"], window=5)
    how = execution(config(decoder, attention=option), forward_of(decoder), seen(5))
    assert how.computed_keys == pytest.approx(keys)


@pytest.mark.parametrize("length", [1, 2, 7, 64])
@pytest.mark.parametrize("window", [None, 1, 3, 7, 100])
def test_mean_keys_is_the_mean_over_a_causal_mask(length, window):
    from forge.attention import Layout
    from forge.attention.mask import mask

    allowed = mask(Layout(True, None, window, length, torch.device("cpu")))
    assert mean_keys(length, window) == pytest.approx(allowed.sum().item() / length)
    if window is None:
        assert mean_keys(length, None) == (length + 1) / 2


@pytest.mark.parametrize("window", [None, 4])
def test_documents_are_counted_as_their_mask_has_them(window):
    from forge.attention import Layout
    from forge.attention.mask import mask

    documents = torch.tensor([[0] * 5 + [1] * 9 + [2] * 2, [0] * 16], dtype=torch.int32)
    positions = torch.stack([torch.cat([torch.arange(n) for n in (5, 9, 2)]), torch.arange(16)])
    made = seen(window, [Batch({"tokens": documents.long(), "documents": documents, "positions": positions}, 29, 0)])
    allowed = mask(Layout(True, documents, window, 16, torch.device("cpu")))
    assert (made.keys, made.tokens, made.targets, made.documents) == (allowed.sum().item(), 32, 29, True)
    sdpa = execution(config(EVERY["llama"], attention=SDPA()), forward_of(EVERY["llama"]), made)
    flex = execution(config(EVERY["llama"], attention=Flex()), forward_of(EVERY["llama"]), made)
    assert (sdpa.computed_keys, flex.computed_keys) == (16, allowed.sum().item() / 32)


def test_what_the_counter_does_not_count():
    """If this fails, torch has learnt to: the tests above can then use those operators as well."""
    known = {str(operator) for operator in flop_registry}
    assert not known & set(UNCOUNTED) and {"aten.mm", "aten.addmm", "aten.bmm"} <= known
    assert counted(EVERY["llama"], attention=SDPA()) < 0.99 * counted(EVERY["llama"])


@pytest.mark.parametrize("changes", [
    {"attention": object()}, {"checkpointing": object()}, {"loss": object()}, {"moe_router": object()},
    {"optimizer": SimpleNamespace(groups=[Group("embedding*", 1.0, None, True)])},
    {"compile": Whole(False, False), "checkpointing": Full()}],
    ids=["attention", "checkpointing", "loss", "router", "frozen", "compiled"])
def test_what_is_executed_is_not_known_where_an_option_does_not_say(changes):
    decoder = replace(EVERY["mixtral"], dropout=0.1)
    assert execution(config(decoder), forward_of(decoder), seen()) is not None
    assert execution(config(decoder, **changes), forward_of(decoder), seen()) is None


# ---- as shares of a peak

def test_a_run_reports_shares_of_a_stated_peak(shards, tmp_path):
    run = train_here(tmp_path / "run", *shards, "attention=eager", "moe_router=loop", "hardware.peak_tflops=0.5",
                     "checkpointing=full")
    result = run.result
    seconds = result["step_ms"]["mean"] / 1e3
    assert result["tokens_per_second"] == pytest.approx(12 * 32 / seconds)
    from forge.config import load

    forward = forward_of(load(run.run_dir).model)
    share = 12 * 32 / seconds / 0.5e12
    assert result["mfu"] == pytest.approx(convention(forward, 32) * share)
    assert result["mfu_exact"] == pytest.approx(exact(forward, 16.5) * share)
    again = forward.in_blocks + forward.attention_per_key * 32
    assert result["hfu"] == pytest.approx((convention(forward, 32) + again) * share)
    report = (run.run_dir / "report.md").read_text()
    for name, key in (("MFU by convention", "mfu"), ("exactly causal", "mfu_exact"), ("executed (HFU)", "hfu")):
        assert f"{name} {result[key]:.1%}" in report


def test_only_tokens_that_are_trained_on_count_for_mfu_and_all_for_hfu(shards, tmp_path):
    result = train_here(tmp_path / "run", *shards, "attention=eager", "moe_router=loop", "hardware.peak_tflops=0.5",
                        "batching.mask_documents=true").result
    assert 0 < result["tokens"] < 6 * 12 * 32
    assert result["hfu"] / result["mfu"] == pytest.approx(6 * 12 * 32 / result["tokens"])
    assert result["mfu_exact"] < result["mfu"]


def test_a_cpu_has_no_peak_of_its_own(shards, tmp_path, said):
    result = train_here(tmp_path / "run", *shards).result
    assert [result[name] for name in ("mfu", "mfu_exact", "hfu")] == [None] * 3
    assert not any("peak" in sentence for sentence in said())
    assert "Of the peak" not in (tmp_path / "run/report.md").read_text()


def test_more_than_the_peak_is_an_error_and_no_figure(shards, tmp_path, said):
    run = train_here(tmp_path / "run", *shards, "hardware.peak_tflops=1e-6")
    assert run.code == 0 and [run.result[name] for name in ("mfu", "mfu_exact", "hfu")] == [None] * 3
    (sentence,) = [sentence for sentence in said() if "peak" in sentence]
    assert "mfu_exact would be" in sentence and "1e-06 TFLOP/s is not the peak" in sentence
    assert "hardware.peak_tflops=" in sentence


def test_the_convention_alone_may_pass_the_peak(said):
    """Rows of 128 thousand tokens: half of what it counts is never computed."""
    long = {"mfu": 1.2, "mfu_exact": 0.7, "hfu": None}
    assert possible(long, 1e12) == long and said() == []
    assert possible({"mfu": 1.2, "mfu_exact": 0.7, "hfu": 1.01}, 1e12, most=2.0)["hfu"] == 1.01 and said() == []
    assert possible({"mfu": 1.2, "mfu_exact": 0.7, "hfu": 1.01}, 1e12) == dict.fromkeys(long)


def test_an_unknown_gpu_gives_null_and_a_hint(monkeypatch, said):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA RTX A1000")
    gpu = torch.device("cuda", 0)
    assert peak_flops(gpu, None) is None and peak_flops(gpu, None) is None
    (sentence,) = said()
    assert "NVIDIA RTX A1000" in sentence and "set hardware.peak_tflops=" in sentence
    assert peak_flops(gpu, 20.0) == 20e12


@pytest.mark.parametrize(("name", "tflops"), [
    ("NVIDIA H200", 989.4), ("NVIDIA H100 80GB HBM3", 989.4), ("NVIDIA H100 PCIe", 756.0), ("NVIDIA H100 NVL", 835.0),
    ("NVIDIA A100-SXM4-80GB", 312.0), ("NVIDIA GH200 480GB", 989.4), ("NVIDIA B200", 2250.0), ("NVIDIA L40S", 362.0),
    ("NVIDIA GeForce RTX 4090", 165.2), ("NVIDIA GeForce RTX 4090 Laptop GPU", None), ("NVIDIA H20", None),
    ("Tesla V100-SXM2-16GB", 125.0), ("NVIDIA A10", None)])
def test_peaks_by_name(name, tflops, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    found = peak_flops(torch.device("cuda", 0), None)
    assert found == (None if tflops is None else tflops * 1e12)
    assert sum(bool(re.search(pattern, name)) for pattern in PEAK_TFLOPS) <= 2


def test_a_peak_is_more_than_nothing():
    from conftest import composed

    from forge.config import realise

    config = realise(composed("hardware.peak_tflops=0"))
    assert any("hardware.peak_tflops=0.0: more than 0" in problem for problem in config.hardware.problems(config))


@pytest.fixture
def said(monkeypatch):
    """What notes.say was asked to say, each sentence once."""
    sentences = []
    monkeypatch.setattr(notes, "_said", set())
    monkeypatch.setattr(notes.logger, "warning", sentences.append)
    return lambda: sentences
