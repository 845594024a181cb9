"""No inert setting: a run reads every setting of every chosen part, not only to check it.

Reads of the dataclasses' fields are recorded while the worker builds and trains: three updates, with evaluation and
snapshots. That a value is read does not yet mean that it matters; that it is not read means that it cannot.
"""

import dataclasses
import sys

import pytest
from conftest import composed, tiny, train_here

import forge.worker
from forge.config import realise

# What has no occasion to be read in one process on a CPU. Everything else is a setting that does nothing.
ELSEWHERE = {
    "run_dir": "the worker's command line",
    "launch": "the parent's: it starts the worker",
    "hardware.processes": "the parent's: how many workers it starts",
    "hardware.timeout_seconds": "between ranks only",
    "comm.bucket_cap_mb": "between ranks only",
    "comm.gradient_as_bucket_view": "between ranks only",
    "comm.static_graph": "between ranks only",
    "precision.reduce": "between ranks only",
    "data.conversation.picture_token": "of a tokenizer.json: those of bytes need no names",
    "data.conversation.turn_start": "the same",
    "data.conversation.turn_end": "the same",
    "model.family": "whose layout weights are read and written in",
    "model.vision.family": "the same",
    "model.max_length": "rotary positions end nowhere: there it is only written down, as Decoder says",
}
# What latent attention knows not: other values than none are refused with it, see Decoder.problems.
WITHOUT_LATENT = {"model.qk_norm", "model.clip_qkv", "model.attention_gate"}
LINE = ["steps=3", "evaluation=heldout", "evaluation.every=1", "snapshot=inline", "tracker=[console,tensorboard]"]
RUNS = {
    "default": [],
    "others": ["dataloader=webdataset", "dataloader.workers=null", "overlap=prefetch", "checkpointing=selective",
               "schedule=wsd", "loss=chunked", "precision=fp16", "attention=flash", "moe_router=loop",
               "operators=handwritten", "parallel=expert", "parallel.size=1"],
    "eight": ["model.routing.balance=overflow", "precision=fp8", "optimizer=lars", "hardware.garbage=frozen"],
    "muon": ["optimizer=muon", "model.routing.balance=bias"],
    "latent": ["model.latent={q_rank: 24, kv_rank: 20, rotary_width: 8, value_width: 8, eps: 1.0e-6}",
               "model.dense_first={layers: 1, hidden: 48}", "model.rotary.interleaved=true", "operators=handwritten"],
    "conversation": ["batching=packed", "attention=eager", "model.vocab_size=259", "data.conversation={messages_field: "
                     "null, picture_size: 8, tokens_per_picture: 4, max_tiles: 1, fit: squash, max_length: 32, "
                     "picture_token: P, turn_start: S, turn_end: E}"],
    "gated": ["model.attention_gate=element", "operators=fused"],
    "pictures": ["model=vlm_tiny", "model.vision.layers=1", "model.vision.layer_scale=0.1"],
    "shapes": ["data=shapes", "data.num_pictures=40", "data.size=8", "data.heldout=0.5", "evaluation=answers",
               "model=vlm_tiny", "model.vision.layers=1", "batching=packed", "sequence_length=256", "global_batch=2",
               "micro_batch=1"],
    "packed": ["batching=packed", "attention=eager"],
    "tokens": ["data=tokens", "data.tokenizer=bytes", "batching=packed"],
    "staged": ["data.shuffle_shards=1", "data.staging={folder: null, max_gb: 1, memory_gb: 1, ahead: 1, copies: 1, "
               "pins: {scores: SCORES, share: 0.5}}", "batching=packed", "attention=eager"],
    "bucketed": ["batching=bucketed", "batching.edges=[8,16]"],
    "more": ["schedule=constant", "precision=bf16", "checkpointing=full", "attention=flex",
             "optimizer.groups=[{match: '*norm*', lr_scale: 0.5, weight_decay: 0.1, frozen: false}]"],
}
BY_ALL_FIELDS = ("__repr__", "__eq__", "__hash__", "replace", "_replace")       # methods that read whatever there is


def settings(value, path=""):
    """(dotted name, class, field) of every setting below a value."""
    if dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            name = f"{path}.{field.name}".lstrip(".")
            yield name, type(value), field.name
            yield from settings(getattr(value, field.name), name)
    for name, item in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from settings(item, f"{path}.{name}")


def noting(cls, reads):
    """cls.__getattribute__ that adds (cls, field) to reads."""
    plain, fields = cls.__getattribute__, {field.name for field in dataclasses.fields(cls)}

    def __getattribute__(self, name):
        if name in fields and sys._getframe(1).f_code.co_name not in BY_ALL_FIELDS:
            reads.add((cls, name))
        return plain(self, name)

    return __getattribute__


@pytest.mark.parametrize("words", RUNS.values(), ids=RUNS)
def test_a_run_reads_every_setting(words, shards, token_file, tmp_path, monkeypatch):
    told = {"data=tokens": token_file, "data=shapes": ["data=shapes", f"data.cache={tmp_path / 'cache'}"]}
    shards, words = (told[words[0]], words[1:]) if words[0:1] and words[0] in told else \
        ([*shards, "data.heldout=null"], words)
    (tmp_path / "scores").write_text('{"shard": "000000.tar", "score": 1}')
    words = [word.replace("SCORES", str(tmp_path / "scores")) for word in words]
    line = [word for word in LINE if not (word == "evaluation=heldout" and "evaluation=answers" in words)]
    config = realise(composed(*tiny([*shards, *line, *words]), f"run_dir={tmp_path}"))
    found = list(settings(config))
    reads, train = set(), forge.worker._train

    def train_and_note(*arguments):
        for cls in {cls for _, cls, _ in found}:
            monkeypatch.setattr(cls, "__getattribute__", noting(cls, reads))
        return train(*arguments)

    monkeypatch.setattr(forge.worker, "_train", train_and_note)
    run = train_here(tmp_path / "run", *shards, *line, *words)
    assert run.code == 0, run.err
    unread = {name for name, cls, field in found if (cls, field) not in reads}
    # Those that a user who sets them is told about; a whole group that is not used is read all the same.
    unplayed = {name for name in config.model.unused() if "." in name}
    if any(word.startswith("model.latent=") for word in words):
        unplayed |= WITHOUT_LATENT
    assert unread == (ELSEWHERE.keys() | unplayed) & {name for name, _, _ in found}
