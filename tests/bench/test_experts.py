"""What bench=experts says of a contender: right or wrong, what it keeps, and how many times as long it takes."""

import json
from dataclasses import replace

import pytest
import torch
from planted import plant
from routings import routing
from simulated import WORDS

from forge.bench.__main__ import run
from forge.bench.experts import WAYS, Experts
from forge.bench.probes import contenders, experts
from forge.bench.probes.contenders import MADE, Contender, Layer, contender, plain
from forge.bench.probes.experts import Proof
from forge.bench.probes.floor import Rates, backward, forward
from forge.bench.probes.proven import allowed, errors, repeats, results, saved_bytes
from forge.bench.probes.timed import timed, times
from forge.bench.turns import Block, Turn
from forge.errors import ConfigError, Exit
from forge.moe_router.loop import Loop
from forge.moe_router.sorted import Sorted

CPU = torch.device("cpu")
SHAPE = {"tokens": 24, "width": 16, "hidden": 8, "experts": 6, "top_k": 2}
SETTINGS = {"loop_rows": 100, "skew": 2.5, "tolerance": 4.0, "blocks": 2, "spare": 0, "calls": 1, "seconds": 0.001,
            "gate": "float32", "aux_loss": 0.01, "z_loss": 0.001, "square_size": 64, "copy_mb": 1}
PLAIN = SETTINGS | {"skew": None, "aux_loss": 0.0, "z_loss": 0.0}
OTHERS = ("torchtitan_way", "hf_way", "grouped_only", "dense")


def layer(dtype=torch.float32, how=None, gate=torch.float32, **sizes):
    return Layer.drawn({**SHAPE, **sizes}, how or routing(normalize=True), CPU, dtype, gate)


def named(name, of, option=None):
    return contender(name, of, option or {"loop": Loop(), "sorted": Sorted()}.get(name))


@pytest.mark.parametrize("how", [{"normalize": True}, {}, {"score": "softmax_of_chosen"},
                                 {"score": "sigmoid", "normalize": True, "scale": 2.5}, {"score": "sigmoid"}], ids=str)
@pytest.mark.parametrize("name", [*OTHERS, "sorted"])
def test_each_contender_computes_the_plain_algorithm(name, how):
    """In float32: `allowed` of the 48 rows is 4 * (1 + sqrt(48)) half roundings, 1.9e-6."""
    of = layer(how=routing(**how))
    ours = named(name, of)
    found = errors(results(ours), results(plain(ours.kind, of)))
    assert max(found.values()) <= allowed(4.0, torch.float32, 48) < 2e-6, found
    wanted = {"x", "y", "up", "down"} if name == "dense" else {"x", "y", "gate_up", "down"}
    assert found.keys() == wanted | ({"gate.weight"} if ours.kind == "experts" else set())


@pytest.mark.parametrize("sizes", [{"top_k": 1}, {"top_k": 6}, {"experts": 1, "top_k": 1}, {"tokens": 1}], ids=str)
def test_odd_layers(sizes):
    of = layer(**sizes)
    for name in (*OTHERS, "sorted"):
        ours = named(name, of)
        assert max(errors(results(ours), results(plain(ours.kind, of))).values()) <= 2e-6, name


def broken(what):
    """The sorted contender, with a mistake."""
    def made(name, of):
        right = named("sorted", of)
        if what == "y":
            return replace(right, forward=lambda x: right.forward(x) * 1.001)
        if what == "not a number":
            return replace(right, forward=lambda x: right.forward(x) * float("nan"))
        weights = dict(right.weights)
        parameter = weights[what] if what != "x" else None

        def forward(x):     # y as it should be, and a gradient that is not
            source = x if parameter is None else parameter
            return right.forward(x) + 0.001 * (source - source.detach()).sum()
        return replace(right, forward=forward)
    return made


def test_products_are_held_against_rows_in_their_own_order(monkeypatch):
    """A gate whose close choices fall otherwise in float32: the reference takes those of the layer's own format."""
    def gate(x, weight, routing):
        weights, chosen = plain_gate(x, weight, routing)
        return weights, (chosen + (x.dtype == torch.float32)) % SHAPE["experts"]

    plain_gate = contenders._plain_gate
    monkeypatch.setattr(contenders, "_plain_gate", gate)
    of = layer(torch.bfloat16)
    assert max(errors(results(named("grouped_only", of)), results(plain("products", of))).values()) < 0.02


@pytest.mark.parametrize("what", ["y", "x", "gate.weight", "gate_up", "down", "not a number"])
def test_a_contender_that_is_wrong_is_named_and_not_timed(what, monkeypatch):
    monkeypatch.setitem(MADE, "broken", broken(what))
    of = layer()
    proof = Proof(of, SETTINGS, {})
    rows = [proof.row(name) for name in ("dense", "broken", "torchtitan_way")]
    experts._time(rows, proof)
    assert [row["status"] for row in rows] == ["measured", "wrong", "measured"]
    worst = "y" if what == "not a number" else what
    assert f"{worst} is " in rows[1]["reason"] and "not timed" in rows[1]["reason"] and "ms" not in rows[1]
    assert "ms" in rows[2] and rows[2]["skewed"]["times"]["estimate"] > 0


def test_one_that_is_wrong_with_skewed_loads_only_is_not_timed_with_them(monkeypatch):
    """A capacity of 1.5 times the mean drops nothing of balanced loads, and most of an expert that has 2.5 times."""
    of = layer(tokens=60)
    right = named("sorted", of)
    monkeypatch.setitem(MADE, "capped", lambda name, of: replace(
        right, name=name, forward=lambda x: right.forward(x) * (0.0 if x.equal(skewed) else 1.0)))
    skewed = of.skewed(2.5)
    proof = Proof(of, SETTINGS, {})
    rows = [proof.row("capped")]
    experts._time(rows, proof)
    assert rows[0]["status"] == "measured" and rows[0]["skewed"]["error"] == pytest.approx(1.0)
    assert "not timed" in rows[0]["skewed"]["reason"] and "times" not in rows[0]["skewed"]


def test_gradients_of_skewed_loads_are_proven_too(monkeypatch):
    """The output is as it should be, and a gradient is not."""
    of = layer(tokens=60)
    right, skewed = named("sorted", of), of.skewed(2.5)

    def forward(x):
        found = right.forward(x)
        return found + 0.01 * (x - x.detach()).sum() if torch.equal(x, skewed) else found

    monkeypatch.setitem(MADE, "bent", lambda name, of: replace(right, name=name, forward=forward))
    proof = Proof(of, SETTINGS, {})
    rows = [proof.row("bent")]
    experts._time(rows, proof)
    assert rows[0]["skewed"]["errors"]["y"] <= proof.allowed()
    assert "skewed: x is " in experts._with_text(rows[0])["reason"] and "times" not in rows[0]["skewed"]


@pytest.mark.parametrize("weights", [{"aux_loss": 0.01}, {"z_loss": 0.001}, {"aux_loss": 0.01, "z_loss": 0.001}])
@pytest.mark.parametrize("wrong", [False, True])
def test_losses_are_asked_of_routers_and_their_gradients_proven(weights, wrong, monkeypatch):
    """Others have none. A router without the gradient of one is not timed, though beside the output's it is small."""
    of = layer()
    proof = Proof(of, PLAIN | weights, {})
    proof.right = [named("dense", of), named("sorted", of), named("hf_way", of)]
    monkeypatch.setattr(Proof, "option", lambda self, name: Sorted())
    if wrong:
        monkeypatch.setattr(experts, "contender", lambda name, lossy, option: named(name, of))
    rows = [{"name": one.name, "status": "measured", "kind": one.kind} for one in proof.right]
    experts._time(rows, proof)
    assert [row["name"] for row in rows if "losses" in row] == ["sorted"]
    assert ("times" in rows[1]["losses"]) != wrong, rows[1]["losses"]


def test_a_gate_of_another_format_is_one_format_for_all():
    """In bfloat16 its gradient is rounded to that, in the plain algorithm's weights it is not."""
    of = layer(gate=torch.bfloat16)
    assert of.gate.dtype == of.coarsest == torch.bfloat16 and of.x.dtype == torch.float32
    for name in ("sorted", "torchtitan_way"):
        found = errors(results(named(name, of)), results(plain("experts", of)))
        assert found["gate.weight"] <= 2**-8 and max(found["y"], found["x"], found["down"]) < 2e-6, name


@pytest.mark.parametrize(("sizes", "there", "both"), [
    ((8192, 2048, 768, 128, 8), 0.863, 2.516), ((16384, 2048, 1024, 64, 8), 2.246, 6.595),
    ((8192, 4096, 14336, 8, 2), 7.369, 22.061), ((24576, 1536, 256, 128, 8), 0.769, 2.142)])
def test_the_floor_of_layers_that_were_computed_by_hand(sizes, there, both):
    """In bfloat16, at 790 TFLOP/s and 4.3 TB/s."""
    tokens, width, hidden, num_experts, top_k = sizes
    x, down = (torch.empty(size, dtype=torch.bfloat16, device="meta")
               for size in ((tokens, width), (num_experts, width, hidden)))
    of = Layer(x, x, x, x, down, routing(num_experts=num_experts, top_k=top_k))
    rates = Rates(790e12, 4.3e12, 8192, 1000)
    found = rates.ms(forward(of)), rates.ms(backward(of))
    assert (round(found[0], 3), round(sum(found), 3)) == (there, both)


def test_what_cannot_run_is_a_row_with_its_reason(monkeypatch):
    def full(name, of):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

    monkeypatch.setitem(MADE, "full", full)
    monkeypatch.setattr("forge.bench.probes.products.runs_on", lambda *asked: False)
    proof = Proof(layer(tokens=51), SETTINGS, {})
    rows = {name: proof.row(name) for name in ("full", "grouped_kernels", "loop")}
    assert {name: row["status"] for name, row in rows.items()} == {
        "full": "out of memory", "grouped_kernels": "failed", "loop": "left out"}
    assert "2 GiB" in rows["full"]["reason"] and "102 rows are more than bench.loop_rows=100" in rows["loop"]["reason"]
    assert not proof.right


def known(keep):
    """A contender that saves what `keep` makes of x and of its weight."""
    class Saving(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight):
            y = x @ weight
            ctx.save_for_backward(*keep(x, weight, y))
            return y

        @staticmethod
        def backward(ctx, grad):
            return grad, torch.zeros(16, 16)

    weight = torch.randn(16, 16, requires_grad=True)
    of = layer()
    return Contender("known", "experts", lambda x: Saving.apply(x, weight), of.x, of.gradient, {"weight": weight})


@pytest.mark.parametrize(("keep", "numbers"), [
    (lambda x, weight, y: [], 0), (lambda x, weight, y: [weight, y], 0), (lambda x, weight, y: [x], 24 * 16),
    (lambda x, weight, y: [x, x[:3], x.T], 24 * 16), (lambda x, weight, y: [x, weight, y, y * 2], 2 * 24 * 16),
    (lambda x, weight, y: [y[:, :1] * 1, torch.arange(6)], 24 + 12)])
def test_saved_bytes_of_a_known_layer_are_exact(keep, numbers):
    """Of 4 bytes each: storages once, views and all, without weights and the output."""
    assert saved_bytes(known(keep)) == 4 * numbers


def test_saved_bytes_of_the_dense_layer():
    """x [24, 16]; of the hidden layer, 16 wide, both halves as one [24, 32], silu's result, and the product."""
    assert saved_bytes(named("dense", layer())) == 4 * 24 * (16 + 32 + 16 + 16)


def test_the_least_that_must_be_saved_is_that_of_the_first_shape():
    """225 MiB, as computed by hand: x 32, what enters the activation 192, metadata 1."""
    drawn = torch.empty(8192, 2048, dtype=torch.bfloat16, device="meta")
    up = torch.empty(128, 2 * 768, 2048, device="meta")
    of = Layer(drawn, drawn, drawn, up, up.transpose(1, 2)[..., :768], routing(num_experts=128, top_k=8))
    assert of.least_saved == 225 * 2**20 and of.flops == 18 * 8192 * 8 * 2048 * 768


@pytest.mark.parametrize(("load", "wanted"), [(2.5, 20), (100.0, 24), (1.5, 12)])
def test_a_skewed_layer_has_the_load_that_was_asked_for(load, wanted):
    """The mean of 24 tokens, 2 choices and 6 experts is 8; no expert can have more than every token."""
    of = layer()
    mixture = Sorted().build(16, 8, of.routing)
    mixture.gate.weight.data = of.gate
    assert mixture(of.skewed(load)[None], None)[2][0, 0] == wanted


def test_what_repeats_its_bits_says_so():
    of = layer()
    first = results(named("sorted", of))
    assert repeats(first, results(named("sorted", of)))
    first["down"][0, 0, 0] += 1e-6
    assert not repeats(first, results(named("sorted", of)))


def test_overheads_and_ratios_are_of_the_same_turns():
    of = layer(tokens=64)
    proof = Proof(of, PLAIN, {})
    rows = [proof.row(name) for name in ("dense", "grouped_only", "torchtitan_way")]
    experts._time(rows, proof)
    dense, products, other = rows
    assert dense["over_dense"]["estimate"] == 1 and "overhead_ms" not in dense and "skewed" not in other
    assert other["overhead_ms"] == other["ms"]["median"] - products["ms"]["median"]
    assert len(other["samples_ms"]) == 4 and other["ms"]["p10"] <= other["ms"]["median"] <= other["ms"]["p90"]
    assert other["forward_ms"] < other["ms"]["median"] and "over_sorted" in other and other["over_sorted"] is None


def test_a_ratio_is_that_of_the_times_of_one_block():
    """In the second block everything takes three times as long, and the ratio is the same."""
    def turn(ms):
        return Turn([ms, ms], [], 128.0, {"forward": ms}, 1.0, None, [])

    blocks = [Block(["slow", "dense", "dense", "slow"], [turn(ms * pace) for ms in (8.0, 2.0, 2.0, 8.0)])
              for pace in (1.0, 3.0)]
    assert times("slow", "dense", blocks) == pytest.approx({"estimate": 4.0, "low": 4.0, "high": 4.0})
    assert timed("slow", blocks, layer())["over_dense"]["estimate"] == pytest.approx(4.0)


def test_a_whole_run_writes_what_it_shows(tmp_path, capsys, monkeypatch):
    package = plant(tmp_path, "moe_router", "halved", HALVED)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    code = run([*WORDS, "model.width=16", "model.heads=1", "model.kv_heads=1", "model.head_width=16", "model.layers=1",
                "--config-dir", f"{tmp_path}/conf", f"allowed_packages={package}", "bench=experts",
                "bench.shapes=[[24,16,8,6,2]]", "bench.contenders=[dense,sorted,halved]", "bench.seconds=0.001",
                "bench.skew=null", "bench.square_size=64", "bench.copy_mb=1", f"run_dir={tmp_path}/record"])
    result = json.loads((tmp_path / "record/result.json").read_text())
    rows = {row["name"]: row for row in result["rows"]}
    assert code == Exit.ANSWERED and result["status"] == "finished"
    assert {name: row["status"] for name, row in rows.items()} == {
        "floor": "measured", "dense": "measured", "sorted": "measured", "halved": "wrong"}
    rates = rows["floor"]["rates"]
    assert rates["square_size"] == 64 and rates["flops_per_second"] > 0 and rates["bytes_per_second"] > 0
    assert rows["sorted"]["over_floor"] == rows["sorted"]["ms"]["median"] / rows["floor"]["floor_ms"]
    assert rows["sorted"]["losses"]["times"]["estimate"] > 0 and "over_floor" not in rows["dense"]
    assert rows["sorted"]["shape"] == {"tokens": 24, "width": 16, "hidden": 8, "experts": 6, "top_k": 2}
    report = (tmp_path / "record/report.md").read_text()
    assert "The gate's weights are float32; the column losses is of aux_loss=0.01, z_loss=0.001" in report
    assert "| 24 x 16 x 8, 2 of 6 | ms |" in report and "halved: y is 0.5 off" in report
    assert (tmp_path / "record/experts.png").exists() and "over dense" in capsys.readouterr().out


HALVED = """
from dataclasses import dataclass

@dataclass(frozen=True)
class Option:
    def build(self, width, hidden, routing):
        from forge.moe_router.experts import by_sorting
        from forge.moe_router.mixture import Mixture
        return Mixture(width, hidden, routing, lambda *told: by_sorting(*told) / 2)
"""


@pytest.mark.parametrize(("word", "said"), [
    ("bench.shapes=[[8,4,4,2]]", "is no layer: [tokens, width, hidden, experts, top_k]"),
    ("bench.shapes=[[8,4,4,2,3]]", "a token cannot choose 3 of 2 experts"), ("bench.shapes=[]", "nothing to measure"),
    ("bench.contenders=[dens]", "dens is neither an option of moe_router (fused, loop, sonic, sorted) nor one of"),
    ("bench.skew=1", "bench.skew=1.0: more than 1 is wanted"), ("bench.tolerance=0", "more than 0 is wanted"),
    ("model=gpt2_124m", "model=gpt2_124m has no experts")])
def test_bad_input_is_a_sentence(word, said, tmp_path):
    with pytest.raises(ConfigError) as caught:
        run([*WORDS, "bench=experts", word, f"run_dir={tmp_path}/record"])
    assert said in str(caught.value)


def test_every_way_can_be_built_or_says_why_not():
    assert MADE.keys() == set(WAYS)
    assert not list(Experts([[8, 4, 4, 2, 1]], ["dense"], "float32", 0.0, 0.0, 1, 1, 1, None, 1.0, 2, 0, 1, 1.0, 1.0,
                            True).problems())
