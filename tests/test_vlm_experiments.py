"""The experiments on pictures: small, they train, and are judged by the answers that they give; and that one learns."""

import numpy as np
import pytest
from conftest import composed
from test_experiments import settings, train

from forge.config import realise
from forge.data.scenes import KINDS

SMALL = ["hardware=cpu", "tracker=[]", "tracker.every=1", "snapshot=none", "data.size=16", "model.vision.image_size=16",
         "model.layers=2", "model.vision.layers=1", "model.vision.patch_size=4"]


def run(name, folder, *words):
    done = train(folder / "run", f"experiment={name}", *SMALL, f"data.cache={folder / 'cache'}", *words)
    assert done.code == 0 and done.result["status"] == "finished"
    return done.result


@pytest.mark.parametrize(("name", "field", "known"), [("vlm_shapes", "null", set()), ("vlm_shapes", "json", set(KINDS)),
                                                      ("vlm_digits", "json", set())])
def test_it_trains_and_says_how_many_it_answers(name, field, known, tmp_path):
    """Of questions by their kind, too; a caption is of none."""
    kept = ["data.num_pictures=80", "data.heldout=0.4"] if name == "vlm_shapes" else ["data.heldout=0.02"]
    result = run(name, tmp_path, *kept, f"data.conversation.messages_field={field}", "steps=2")
    kinds = {key.removeprefix("exact_") for key in result if key.startswith("exact_")}
    assert kinds == known
    assert 0 <= result["exact"] <= 1 and result["loss_heldout"] > 0


# What each of vlm_steps changes against the one before: setting -> after.
CHANGES = {
    1: {"augment._target_": "forge.augment.gpu.OnDevice", "overlap._target_": "forge.overlap.prefetch.Prefetch"},
    2: {"precision._target_": "forge.precision.bf16.BF16"},
    3: {"attention._target_": "forge.attention.flash.Flash"},
    4: {"compile._target_": "forge.compile.blocks.Blocks"},
    5: {"micro_batch": None},
    6: {"operators._target_": "forge.operators.fused.Fused", "loss._target_": "forge.loss.inplace.Inplace",
        "optimizer.implementation": "triton"},
}


@pytest.mark.parametrize("step", CHANGES)
def test_a_step_changes_what_its_name_says(step):
    """A setting that only the other option has is not looked at."""
    before, after = (settings(f"experiment=vlm_steps/step_{number}") for number in (step - 1, step))
    assert {key: after[key] for key in before.keys() & after.keys() if before[key] != after[key]} == CHANGES[step]


@pytest.mark.parametrize("step", [0, 1, 5, 6])
def test_a_step_trains(step, tmp_path):
    """As it stands but for its size, and for what a CPU has no kernel of; those between differ in that alone."""
    small = ["model.width=32", "model.hidden=32", "model.heads=2", "model.kv_heads=1", "model.head_width=16",
             "model.vocab_size=300", "model.vision.width=24", "model.vision.heads=2", "model.vision.hidden=24",
             "data.conversation.tokens_per_picture=4", "data.conversation.picture_size=16", "data.num_pictures=40",
             "global_batch=4", f"micro_batch={4 if step > 4 else 2}", "steps=1", "dataloader.workers=0",
             "precision=fp32", "compile=none", "attention=sdpa"]
    run(f"vlm_steps/step_{step}", tmp_path, *small)


@pytest.mark.parametrize("kind", ["padded", "bucketed", "packed"])
def test_short_documents_train_in_any_rows(kind, tmp_path):
    np.save(tmp_path / "ids.npy", np.tile([*range(1, 40), 0], 100).astype(np.uint16))
    words = [f"data.train={tmp_path / 'ids.npy'}", "data.end=0", f"data.cache={tmp_path / 'cache'}", "hardware=cpu",
             "tracker=[]", "tracker.every=1", "model.width=32", "model.layers=1", "model.heads=2", "model.hidden=32",
             "model.vocab_size=64", "global_batch=2", "steps=1", "dataloader.workers=0", "precision=fp32",
             "compile=none", "attention=sdpa"]
    done = train(tmp_path / "run", f"experiment=rows/{kind}", *words)
    assert done.code == 0 and (done.result["padding_share"] > 0.9) == (kind == "padded")


def test_seeds_of_runs_share_one_set():
    one, other = (realise(composed("experiment=vlm_shapes", f"seed={seed}")).data for seed in (0, 1))
    assert one == other
