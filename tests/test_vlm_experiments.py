"""The experiments on pictures: small, they train, and are judged by the answers that they give; and that one learns."""

import pytest
from conftest import composed
from test_experiments import train

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


def test_seeds_of_runs_share_one_set():
    one, other = (realise(composed("experiment=vlm_shapes", f"seed={seed}")).data for seed in (0, 1))
    assert one == other
