"""Planted mistakes, as options of a user's own, are found and named; each is the only difference of its comparison."""

import faults
import pytest
from comparing import compare
from planted import plant

import forge.verify.examine
from forge.errors import ConfigError, ForgeError
from forge.verify.__main__ import verify

GELU = ["model.routing=null", "model.activation=gelu", "model.init_std=0.2"]
CUT = ["micro_batch=4"]         # of 12 rows: three micro-batches

FAULTS = {
    "tanh": ("operators", faults.TANH, GELU, "feed_forward"),
    "scaled": ("comm", faults.SCALED, [], "embedding.weight"),
    "summed": ("passes", faults.SUMMED, CUT, "embedding.weight"),
    "mean_of_means": ("passes", faults.MEAN_OF_MEANS, CUT, "embedding.weight"),
    "peeking": ("attention", faults.PEEKING, ["model.init_std=0.2"], "blocks.0.attention"),
    "first_row": ("attention", faults.FIRST_ROW, CUT, "blocks.0.attention"),
    "dropping": ("attention", faults.DROPPING, [], "blocks.0.attention"),
    "other_ties": ("moe_router", faults.OTHER_TIES, [], "(update 2)"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_mistake_is_found_and_named(name, shards, tmp_path):
    group, code, common, named = FAULTS[name]
    allowed = plant(tmp_path, group, name, code)
    answer = compare(tmp_path / "run", f"{group}={name}", common=[*shards, *common], outside=tmp_path, allowed=allowed)
    assert (answer.code, answer.verdict) == (3, "differs"), answer.reason
    assert answer.result["changes"] == [{"setting": group, "baseline": answer.result["changes"][0]["baseline"],
                                         "candidate": name}]
    assert named in answer.reason, answer.reason


def test_an_optimizer_that_decays_too_much_is_seen_in_the_update_alone(shards, tmp_path):
    values = {"lr": 3e-3, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1, "clip": 1.0,
              "implementation": "fused", "max_skipped": 25, "groups": "[]"}
    allowed = plant(tmp_path, "optimizer", "carefree", faults.CAREFREE, **values)
    answer = compare(tmp_path / "run", "optimizer=carefree", common=shards, outside=tmp_path, allowed=allowed)
    passes = answer.result["passes"]
    assert passes["maths"]["same_bits"] and not passes["update"]["within_rule"]
    assert answer.verdict == "differs by design: optimizer = adamw -> carefree"
    assert passes["update"]["first_different"]["name"] == "blocks.0.attention_norm.weight"


def test_a_part_that_the_model_never_uses_is_said_to_be_unshown(shards, tmp_path):
    """Its feed-forwards are experts: with a dense model the same option is found."""
    allowed = plant(tmp_path, "operators", "louder", faults.LOUDER)
    planted = {"outside": tmp_path, "allowed": allowed}
    said = "operators: this model never calls feed_forward of it, so nothing is shown about that part."
    answer = compare(tmp_path / "experts", "operators=louder", common=shards, **planted)
    assert answer.verdict == "same bits" and said in answer.result["notes"]
    assert said in (tmp_path / "experts" / "report.md").read_text()
    dense = compare(tmp_path / "dense", "operators=louder", common=[*shards, "model.routing=null"], **planted)
    assert dense.verdict == "differs" and not any("never calls" in note for note in dense.result["notes"])


def test_modules_are_asked_only_where_forward_or_backward_is_wrong(shards, tmp_path, monkeypatch):
    """An optimizer's update is no module's."""
    asked = []
    monkeypatch.setattr(forge.verify.examine, "first_module", lambda *arguments: asked.append(arguments))
    monkeypatch.setattr(forge.verify.examine, "kind_of", lambda *arguments: "nothing")
    for words, right in ((["optimizer.lr=0.00301"], True), (["optimizer.lr=0.00301", "model.eps=1e-3"], False)):
        answer = compare(tmp_path / str(right), *words, common=shards)
        passes = answer.result["passes"]
        assert answer.verdict == "differs" and not passes["update"]["within_rule"]
        assert passes["maths"]["within_rule"] == right and len(asked) == (not right)


def test_a_baseline_that_never_repeats_itself_proves_nothing(shards, tmp_path):
    allowed = plant(tmp_path, "attention", "drawing", faults.DRAWING)
    answer = compare(tmp_path / "run", common=[*shards, "attention=drawing"], outside=tmp_path, allowed=allowed)
    assert (answer.code, answer.verdict, answer.result["abstained"]) == (4, "cannot judge", True)
    assert "does not repeat itself" in answer.reason


def test_a_mistake_that_is_declared_is_by_design(shards, tmp_path):
    allowed = plant(tmp_path, "comm", "scaled", faults.SCALED)
    answer = compare(tmp_path / "run", "comm=scaled", "declared=comm", common=shards, outside=tmp_path, allowed=allowed)
    assert (answer.code, answer.verdict) == (0, "differs by design: comm = ddp -> scaled")


@pytest.mark.dist
@pytest.mark.slow
def test_a_bucket_that_loses_its_last_parameter_is_found_and_whole_buckets_pass(shards, tmp_path):
    """Each rank of two has its own gradient of it; the same words with the repository's comm differ in nothing."""
    allowed = plant(tmp_path, "comm", "losing", faults.LOSING)
    common = [*shards, "micro_batch=3"]
    answer = compare(tmp_path / "run", "hardware.processes=2", "comm=losing", common=common, outside=tmp_path,
                     allowed=allowed)
    assert (answer.code, answer.verdict) == (3, "differs"), answer.reason
    wrong = {one["name"] for one in answer.result["passes"]["maths"]["tensors"] if not one["fine"]}
    assert wrong == {"head.weight"} and "head.weight" in answer.reason
    whole = compare(tmp_path / "whole", "hardware.processes=2", "comm.bucket_cap_mb=1", common=common)
    assert (whole.code, whole.verdict) == (0, "same maths"), whole.reason
    both = compare(tmp_path / "both", "comm.bucket_cap_mb=1", common=[*common, "hardware.processes=2"])
    assert (both.code, both.verdict) == (0, "same bits"), both.reason


def test_an_option_that_exits_has_crashed(shards, tmp_path):
    allowed = plant(tmp_path, "operators", "leaving", faults.LEAVING)
    with pytest.raises(ForgeError, match=r"The candidate crashed: RuntimeError: sys.exit\(3\)") as raised:
        compare(tmp_path / "run", "operators=leaving", common=shards, outside=tmp_path, allowed=allowed)
    assert raised.value.exit_code == 1


def test_masters_are_compared_in_their_own_format(shards, tmp_path):
    answer = compare(tmp_path / "run", "precision=bf16_pure", common=[*shards, "model.routing=null"],
                     baseline="precision=bf16_master")
    assert answer.verdict == "differs by design: precision = bf16_master -> bf16_pure", answer.reason
    assert not answer.result["passes"]["stored"]["within_rule"]


def test_another_model_that_nobody_declared_is_a_mistake(tmp_path):
    with pytest.raises(ConfigError, match="repeat model=gpt2_124m in baseline="):
        verify(["model=gpt2_124m", f"run_dir={tmp_path}/run"])
