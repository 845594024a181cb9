"""Each of the steps trains on a GPU, with its own kernels: small, but for the width of a head."""

import pytest
import torch
from conftest import Finished, composed

from forge.config import check, realise

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

SMALL = ["hardware=gpu", "model.width=128", "model.layers=2", "model.heads=2", "model.hidden=512",
         "sequence_length=128", "model.max_length=128", "global_batch=8", "steps=6", "tracker=[]", "tracker.every=1",
         "dataloader.workers=0"]


@pytest.mark.parametrize("name", [*(f"nine_steps/step_{step}" for step in range(19)), "gpt2_124m_plain",
                                  "gpt2_124m_fast"])
def test_an_experiment_trains_on_a_gpu(name, shards, tmp_path):
    from forge.freeze import freeze
    from forge.stopping import Stopping
    from forge.worker import work

    small = [word for word in SMALL if name.startswith("nine") or not word.startswith("dataloader")]
    settings = composed(f"experiment={name}", *small, *shards, f"run_dir={tmp_path / 'run'}")
    check(realise(settings))
    freeze(settings, tmp_path / "run")
    run = Finished(int(work(tmp_path / "run", (), Stopping())), "", "", tmp_path / "run")
    assert run.code == 0 and run.result["status"] == "finished"
    assert run.losses[6] < run.losses[1] and abs(run.losses[1] - 10.83) < 0.5       # log(50,257) at the start
    assert run.result["hfu"] is None or 0 < run.result["hfu"] < 1
