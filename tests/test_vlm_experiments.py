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


@pytest.mark.parametrize("name", ["vlm_shapes", "vlm_digits"])
def test_it_trains_and_says_how_many_it_answers(name, tmp_path):
    kept = ["data.num_pictures=80", "data.heldout=0.4"] if name == "vlm_shapes" else ["data.heldout=0.02"]
    result = run(name, tmp_path, *kept, "steps=2")
    kinds = {key.removeprefix("exact_") for key in result if key.startswith("exact_")}
    assert kinds == (set(KINDS) if name == "vlm_shapes" else set())
    assert 0 <= result["exact"] <= 1 and result["loss_heldout"] > 0


def test_seeds_of_runs_share_one_set():
    one, other = (realise(composed("experiment=vlm_shapes", f"seed={seed}")).data for seed in (0, 1))
    assert one == other
