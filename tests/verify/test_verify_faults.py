"""Planted mistakes, as options of a user's own, are found and named; each is the only difference of its comparison."""

import pytest
from planted import plant
import faults
from comparing import compare

GELU = ["model.routing=null", "model.activation=gelu", "model.init_std=0.2"]
CUT = ["micro_batch=4"]         # of 12 rows: three micro-batches

FAULTS = {
    "tanh": ("operators", faults.TANH, GELU, "feed_forward"),
    "scaled": ("comm", faults.SCALED, [], "embedding.weight"),
    "summed": ("passes", faults.SUMMED, CUT, "embedding.weight"),
    "mean_of_means": ("passes", faults.MEAN_OF_MEANS, CUT, "embedding.weight"),
    "peeking": ("attention", faults.PEEKING, ["model.init_std=0.2"], "blocks.0.attention"),
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
