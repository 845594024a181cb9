"""The options of the repository keep what they promise, by this command's own judgement."""

import pytest
from comparing import compare

LINE = ["model.init_std=0.2", "model.head_width=24", "micro_batch=4"]
SAME = {
    "attention=eager": "same", "attention=flash": "same bits",
    "operators=handwritten": "same",
    "moe_router=loop": "same", "moe_router=fused": "same bits",
    "loss=chunked loss.chunk_tokens=7": "same",
    "overlap=prefetch": "same bits",
    "checkpointing=full": "same bits", "checkpointing=selective": "same bits",
    "dataloader=webdataset dataloader.workers=1": "same bits",
    "micro_batch=12": "same", "micro_batch=1": "same",
    "optimizer.implementation=loop": "same", "optimizer.implementation=foreach": "same",
    "reproducible=true": "same bits", "comm.bucket_cap_mb=1": "same bits",
}


@pytest.mark.parametrize("words", SAME)
def test_options_that_promise_the_same_give_it(words, shards, tmp_path):
    answer = compare(tmp_path / "run", *words.split(), common=[*shards, *LINE])
    promised = {"same bits": {"same bits"}, "same": {"same bits", "same maths"}}[SAME[words]]
    assert answer.code == 0 and answer.verdict in promised, answer.reason
    assert answer.result["passes"]["maths"]["error"]["candidate"] < 1e-6
    unused = [note for note in answer.result["notes"] if "never calls" in note]
    assert bool(unused) == words.startswith("operators"), "experts are the feed-forward here"


@pytest.mark.slow
@pytest.mark.parametrize("option", ["blocks", "whole"])
def test_compiled_it_is_the_same_maths(option, shards, tmp_path):
    answer = compare(tmp_path / "run", f"compile={option}", common=[*shards, *LINE])
    assert (answer.code, answer.verdict) == (0, "same maths"), answer.reason


DESIGN = {
    "model.activation=gelu_tanh model.routing=null": ("model.activation = swiglu -> gelu_tanh", None),
    "model.eps=1.1e-5": ("model.eps = 1e-05 -> 1.1e-05", "maths"),
    "model.dropout=0.1": ("model.dropout = 0.0 -> 0.1", "maths"),
    "model.init_std=0.1": ("model.init_std = 0.02 -> 0.1", None),
    "global_batch=24": ("global_batch = 12 -> 24", "maths"),
    "seed=1": ("seed = 0 -> 1", "maths"),
    "optimizer.weight_decay=0.105": ("optimizer.weight_decay = 0.1 -> 0.105", "update"),
    "optimizer.lr=0.00301": ("optimizer.lr = 0.003 -> 0.00301", "update"),
    "schedule=constant": ("schedule = cosine -> constant", "update"),
}


@pytest.mark.parametrize("words", DESIGN)
def test_what_is_meant_to_differ_is_said_to(words, shards, tmp_path):
    setting, wrong = DESIGN[words]
    answer = compare(tmp_path / "run", *words.split(), common=shards)
    assert answer.code == 0 and answer.verdict.startswith("differs by design: ") and setting in answer.verdict
    for name, one in answer.result["passes"].items():
        assert wrong is None or one["within_rule"] == (wrong not in (name, *(["maths"] if name == "deployed" else [])))
