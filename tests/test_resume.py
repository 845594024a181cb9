"""A run that is killed and resumed is the run that was never killed, to the last bit."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import TINY, Finished, composed, forge, train_apart, train_here

STEPS = 40
CASES = {       # processes, data workers, micro-batches an update
    "1 process": (1, 0, 1),
    "1 process, 2 workers, accumulation": (1, 2, 3),
    "2 processes, accumulation": (2, 0, 3),
    "2 processes, 2 workers": (2, 2, 1),
}


def words(processes: int, workers: int, accumulation: int) -> list[str]:
    loader = ["dataloader=webdataset", f"dataloader.workers={workers}"] if workers else ["dataloader=simple"]
    return [*loader, "snapshot=inline", "snapshot.every=3", f"steps={STEPS}", "model.dropout=0.1", "overlap=prefetch",
            f"hardware.processes={processes}", "global_batch=12", f"micro_batch={12 // processes // accumulation}"]


def kill_after(run_dir: Path, line: list[str], step: int) -> None:
    """Start a run, and kill -9 all its processes once it has recorded `step`."""
    process = subprocess.Popen([sys.executable, "-m", "forge.train", *TINY, *line], stdout=subprocess.DEVNULL,
                               stderr=subprocess.DEVNULL)
    metrics = run_dir / "metrics.jsonl"
    deadline = time.monotonic() + 90
    while process.poll() is None and time.monotonic() < deadline:
        if metrics.exists() and f'"step": {step},' in metrics.read_text():
            break
        time.sleep(0.005)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    for pid in [process.pid, *map(int, children)]:
        os.kill(pid, signal.SIGKILL)
    process.wait()


@pytest.mark.dist
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_killed_twice_and_resumed_is_the_same_run(case, shards, tmp_path):
    line = [*shards, *words(*case)]
    whole = train_apart(tmp_path / "whole", *line)
    assert whole.code == 0, whole.err
    broken = tmp_path / "broken"
    kill_after(broken, [*line, f"run_dir={broken}"], step=7)
    for step in (19, None):
        resumed = [*line, f"resume={broken}"]
        if step:
            kill_after(broken, resumed, step)
        else:
            done = forge("train", *TINY, *resumed)
            assert done.returncode == 0, done.stderr
    losses = Finished(done.returncode, "", "", broken).losses
    assert list(losses) == list(range(1, STEPS + 1))
    assert losses == whole.losses


def test_the_runs_above_cross_an_epoch(shards):
    """Otherwise they would not show that a resume finds its way over the edge."""
    from forge.config import realise

    config = realise(composed(*TINY, *shards))
    plan = config.batching.plan(config.data.open("train"), 0, 0, 12)
    assert len(plan) < 19


def test_resume_with_other_workers_is_the_same_run(shards, tmp_path):
    line = [*shards, "snapshot=inline", "steps=8", "snapshot.every=4"]
    whole = train_here(tmp_path / "whole", *line)
    train_here(tmp_path / "part", *line, "stop_at=4")
    resumed = resume_here(tmp_path / "part", *line, "dataloader=webdataset", "dataloader.workers=2")
    assert {**resumed.losses} == whole.losses


ROUTED = {
    "bias": ["balance=bias", "aux_loss=0", "score=sigmoid", "shared_hidden=8"],
    "overflow": ["balance=overflow", "balance_from=2", "balance_ramp=4", "threshold=1.05"],
    "global batch": ["aux_scope=global_batch", "jitter=0.1", "capacity_factor=1.0"]}


@pytest.mark.parametrize("routing", ROUTED.values(), ids=ROUTED)
def test_what_routing_remembers_is_resumed(routing, shards, tmp_path):
    """Stopped at 4, in the middle of a ramp: the same losses, and at the end the same files."""
    line = [*shards, "snapshot=inline", "steps=8", "model.init_std=0.2", "model.dropout=0.1", "checkpointing=full",
            *(f"model.routing.{setting}" for setting in routing)]
    whole = train_here(tmp_path / "whole", *line)
    assert whole.code == 0, whole.err
    train_here(tmp_path / "part", *line, "stop_at=4")
    resumed = resume_here(tmp_path / "part", *line)
    assert {**resumed.losses} == whole.losses
    one, other = (json.loads((run.run_dir / "snapshots/step_00000008/manifest.json").read_text())["files"]
                  for run in (whole, resumed))
    assert one["model.safetensors"] == other["model.safetensors"]
    plain = train_here(tmp_path / "plain", *line, "model.routing.balance=none", "model.routing.aux_scope=batch",
                       "model.routing.capacity_factor=null")
    assert plain.losses[8] != whole.losses[8]           # the settings had an effect after the resume


@pytest.mark.dist
def test_resume_with_other_ranks_has_the_same_data(shards, tmp_path):
    line = [*shards, "snapshot=inline", "steps=8", "micro_batch=2"]
    whole = train_apart(tmp_path / "whole", *line)
    train_apart(tmp_path / "part", *line, "stop_at=4", "hardware.processes=2")
    done = train_apart(tmp_path / "part", *line, "stop_at=null", f"resume={tmp_path}/part", "hardware.processes=1")
    assert done.code == 0, done.err
    for step, loss in whole.losses.items():
        assert done.losses[step] == pytest.approx(loss, rel=2e-6), step


@pytest.mark.parametrize(("change", "said"), [
    ("global_batch=24", "belongs to global_batch=12"),
    ("sequence_length=16", "belongs to"),
    ("seed=1", "belongs to seed=0"),
    ("model.width=64", "the snapshot of another model"),
    ("model.layers=3", "the snapshot of another model"),
])
def test_a_run_that_does_not_fit_its_snapshot_is_refused(change, said, shards, tmp_path):
    line = [*shards, "snapshot=inline", "steps=2"]
    train_here(tmp_path / "part", *line)
    done = resume_here(tmp_path / "part", *line, "steps=4", change)
    assert done.code == 2 and said in done.err, done.err


@pytest.mark.parametrize("damage", ["cut", "flip", "foreign", "pickle"])
def test_a_damaged_snapshot_is_refused(damage, shards, tmp_path):
    train_here(tmp_path / "part", *shards, "snapshot=inline", "steps=2")
    snapshot = tmp_path / "part" / "snapshots" / "step_00000002"
    file = snapshot / "model.safetensors"
    data = bytearray(file.read_bytes())
    if damage == "cut":
        file.write_bytes(data[:-10])
    if damage == "flip":
        data[-5] ^= 1
        file.write_bytes(data)
    if damage == "foreign":
        (snapshot / "manifest.json").write_text('{"format": "something else"}')
    if damage == "pickle":
        import torch

        (snapshot / "manifest.json").unlink()
        torch.save({"model": torch.ones(2)}, file)
    done = resume_here(tmp_path / "part", *shards, "snapshot=inline", "steps=4", snapshot=snapshot)
    assert done.code == 4, done.err
    assert str(snapshot) in done.err


def resume_here(run_dir: Path, *overrides: str, snapshot: Path | None = None):
    """Go on with a run of one process in this one."""
    import shutil

    from omegaconf import OmegaConf

    from forge.snapshot.folder import whole_snapshots
    from forge.stopping import Stopping
    from forge.worker import work

    shutil.rmtree(run_dir / "failures", ignore_errors=True)
    settings = composed(*TINY, *overrides, f"run_dir={run_dir}", f"resume={snapshot or whole_snapshots(run_dir)[-1]}")
    OmegaConf.save(settings, run_dir / "config.yaml")
    code = work(run_dir, (), Stopping())
    failures = [json.loads(path.read_text())["message"] for path in run_dir.glob("failures/*.json")]
    return Finished(int(code), "", "\n".join(failures), run_dir)
