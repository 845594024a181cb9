"""The rule, the shares of data, what counts as a change, and what is concluded: without training anything."""

import math
from dataclasses import replace

import pytest
from comparing import compose_once
from conftest import composed

from forge.config import realise
from forge.verify.changes import Change, changes, kind_of
from forge.verify.conclude import Findings, conclude
from forge.verify.pair import Share, shares
from forge.verify.rule import Compared, Distance, Few, Rule

FEW = [Few(10, 10.0), Few(500, 8.0)]
RULE = Rule.of("float32", 512.0, (2.0, 3.0), FEW)
WORSE = 1e-3


def distance(baseline=1e-7, candidate=1e-7, bits=False, elements=1000, name="head.weight", apart=1e-7):
    return Distance(name, 1, elements, baseline, candidate, apart, RULE.allowed(baseline, elements), bits)


def one_pass(name="maths", noise=None, compute="float32", **what):
    return Compared(name, (compute, compute), [], [], [distance(**what)], [distance(**what)],
                    [{"moved": [0, 0]}], noise)


def test_the_allowance_is_the_baselines_error_some_times_over_and_a_derived_floor():
    floor = 2**-24 * (1 + math.sqrt(512))
    assert RULE.allowed(0.0, 10**6) == pytest.approx(floor)
    for elements, times in ((1, 10), (10, 10), (11, 8), (500, 8), (501, 2)):
        assert RULE.allowed(1.0, elements) == pytest.approx(times + floor)
    half = Rule.of("bfloat16", 512.0, (2.0, 3.0), FEW)
    assert half.allowed(1.0, 10**6) == pytest.approx(3 + 2**-8 + math.sqrt(512) * 2**-24)


@pytest.mark.parametrize("candidate", [math.nan, math.inf])
def test_what_is_no_number_is_never_fine(candidate):
    assert not distance(candidate=candidate).fine
    assert conclude(Findings({"maths": one_pass(candidate=candidate)}, [], [], 100.0)).verdict == "differs"


@pytest.mark.parametrize(("passes", "kind", "verdict"), [
    ({"maths": {"bits": True}, "deployed": {"bits": True}}, "maths", "same bits"),
    ({"maths": {"bits": True}, "deployed": {"bits": True}}, "start", "differs by design: x = 1 -> 2"),
    ({"maths": {}, "deployed": {}}, "nothing", "same maths"),
    ({"maths": {}, "deployed": {}}, "maths", "same maths"),
    ({"deployed": {}}, "nothing", "same within rounding"),
    ({"maths": {"candidate": WORSE}, "deployed": {}}, "nothing", "differs"),
    ({"maths": {"candidate": WORSE}, "deployed": {}}, "rounding", "differs"),
    ({"maths": {"candidate": WORSE}, "deployed": {}}, "update", "differs"),
    ({"maths": {"candidate": WORSE}, "deployed": {}}, "maths", "differs by design: x = 1 -> 2"),
    ({"maths": {}, "deployed": {"candidate": WORSE}}, "nothing", "differs"),
    ({"maths": {}, "deployed": {"candidate": WORSE}}, "rounding", "differs"),
    ({"maths": {}, "deployed": {}, "precision": {"candidate": WORSE}}, "rounding", "differs by design: x = 1 -> 2"),
    ({"maths": {}, "deployed": {}, "precision": {"candidate": WORSE}}, "nothing", "differs"),
    ({"maths": {}, "deployed": {}, "precision": {"candidate": 1e-8, "baseline": 1e-6}}, "rounding",
     "differs by design: x = 1 -> 2"),
    ({"maths": {}, "deployed": {}, "update": {"candidate": WORSE}}, "update", "differs by design: x = 1 -> 2"),
    ({"maths": {}, "deployed": {}, "update": {"candidate": WORSE}}, "nothing", "differs"),
    ({"maths": {"candidate": WORSE}, "deployed": {}, "update": {"candidate": WORSE}}, "update", "differs"),
    ({"maths": {"baseline": 1e-4}, "deployed": {}}, "nothing", "cannot judge"),
    ({"maths": {"baseline": math.nan}, "deployed": {}}, "maths", "cannot judge"),
    ({"maths": {}, "deployed": {"candidate": WORSE, "apart": 1e-3, "noise": 6e-4}}, "nothing", "cannot judge"),
    ({"maths": {}, "deployed": {"candidate": WORSE, "apart": 1e-3, "noise": 4e-4}}, "nothing", "differs"),
])
def test_the_verdict(passes, kind, verdict):
    made = {name: one_pass(name, **what) for name, what in passes.items()}
    found = conclude(Findings(made, [], [(Change("x", 1, 2), kind)], 100.0))
    assert found.verdict == verdict
    assert found.exit_code == {"differs": 3, "cannot judge": 4}.get(verdict, 0)
    assert found.reason.endswith(".")


@pytest.mark.parametrize(("moved", "verdict"), [
    ([1, 0], "cannot judge"), ([8, 0], "cannot judge"), ([9, 0], "differs"), ([0, 0], "differs"), ([0, 1], "differs")])
def test_a_few_tokens_between_two_experts_are_no_other_maths(moved, verdict):
    maths = replace(one_pass(candidate=WORSE), values=[{"moved": [0.0, float(count)]} for count in moved])
    assert conclude(Findings({"maths": maths, "deployed": one_pass("deployed")}, [], [], 100.0)).verdict == verdict


def test_a_change_that_explains_hides_no_other_silently():
    both = [(Change("model.eps", 1, 2), "maths"), (Change("attention", "sdpa", "own"), "nothing")]
    passes = {"maths": one_pass(candidate=WORSE), "deployed": one_pass("deployed")}
    assert "What attention = sdpa -> own may have done is hidden" in conclude(Findings(passes, [], both, 100.0)).reason


def test_the_first_tensor_in_forward_order_is_named():
    wrong = [distance(name="a"), distance(name="b", candidate=WORSE), distance(name="c", candidate=1.0)]
    passes = {"maths": replace(one_pass(), tensors=wrong)}
    assert "b is the first" in conclude(Findings(passes, [], [], 100.0)).reason
    assert passes["maths"].worst.name == "c"


def test_changes_are_options_and_settings_but_not_what_follows_from_them():
    found = changes(compose_once(["run_dir=y"]), compose_once([
        "attention=eager", "sequence_length=128", "precision=bf16", "run_dir=x", "optimizer.lr=1.0"]))
    assert {str(change) for change in found} == {
        "attention = sdpa -> eager", "precision = fp32 -> bf16", "sequence_length = 256 -> 128",
        "optimizer.lr = 0.003 -> 1.0"}      # model.max_length follows sequence_length


def test_what_a_change_is_declared_to_change():
    declared = realise_declared()
    for key, kind in (("attention", "nothing"), ("model.width", "maths"), ("model", "maths"), ("data.cache", "nothing"),
                      ("data.tokenizer", "maths"), ("precision.reduce", "rounding"), ("optimizer.lr", "update"),
                      ("optimizer.implementation", "nothing"), ("model.init_std", "start"), ("comm", "nothing"),
                      ("micro_batch", "nothing"), ("global_batch", "maths"), ("steps", "update")):
        assert kind_of(Change(key, 1, 2), declared, []) == kind, key
    assert kind_of(Change("attention.sharpness", 1, 2), declared, ["attention.*"]) == "maths"


def realise_declared():
    from hydra import compose, initialize_config_dir
    from omegaconf import OmegaConf

    from forge.config import conf_dir

    with initialize_config_dir(conf_dir(), version_base="1.3"):
        return OmegaConf.to_container(compose("verify").verify.declared)


@pytest.mark.parametrize(("baseline", "candidate", "wanted"), [
    ([], [], (Share(2, 2), Share(2, 2))),
    ([], ["micro_batch=2"], (Share(8, 8), Share(8, 2))),
    (["micro_batch=2"], ["micro_batch=1"], (Share(8, 2), Share(8, 1))),
    ([], ["hardware.processes=2"], (Share(4, 4), Share(4, 2))),
    ([], ["hardware.processes=2", "micro_batch=2"], (Share(8, 8), Share(8, 2))),
    ([], ["global_batch=16"], (Share(2, 2), Share(4, 4))),
    ([], ["global_batch=64", "micro_batch=1"], (Share(2, 2), Share(16, 2))),
    (["global_batch=480"], ["global_batch=481"], (Share(2, 2), Share(4, 4))),
])
def test_rows_keep_the_proportions_of_the_run(baseline, candidate, wanted):
    sides = [realise(composed(*words)) for words in (baseline, candidate)]
    assert shares(*sides, rows=2, most_micro_batches=8) == wanted
    for share, side in zip(wanted, sides, strict=True):
        assert share.rows % (share.micro_batch * side.hardware.processes) == 0
