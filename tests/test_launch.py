"""Starting, stopping, failing and being killed, as a user meets them."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
from conftest import TINY, forge, train_apart

pytestmark = pytest.mark.dist


def started(run_dir: Path, *overrides: str) -> subprocess.Popen:
    """A long run, once its first steps are recorded."""
    process = subprocess.Popen([sys.executable, "-m", "forge.train", *TINY, "steps=100000", *overrides,
                                f"run_dir={run_dir}"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 90
    metrics = run_dir / "metrics.jsonl"
    while not (metrics.exists() and len(metrics.read_text().splitlines()) > 3):
        assert process.poll() is None, process.stderr.read()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return process


def workers_of(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def processes_on(run_dir: Path) -> list[int]:
    """Workers of a run, and the data workers that are forks of them."""
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if str(run_dir).encode() in (place / "cmdline").read_bytes():
                found.append(int(place.name))
    return found


def gone(pids: list[int], seconds: float = 10) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if not any(Path(f"/proc/{pid}").exists() and "Z" not in Path(f"/proc/{pid}/stat").read_text().split()[2]
                   for pid in pids):
            return True
        time.sleep(0.05)
    return False


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 75)])
def test_a_signal_saves_and_says_so(shards, tmp_path, number, code, processes):
    run = started(tmp_path / "run", *shards, "snapshot=inline", f"hardware.processes={processes}", "micro_batch=2")
    children = workers_of(run.pid)
    assert len(children) == processes
    run.send_signal(number)
    out, err = run.communicate(timeout=60)
    assert run.returncode == code, err
    assert "Traceback" not in err + out
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["status"] == "stopped"
    assert Path(result["snapshot"]).name == f"step_{result['steps']:08d}"
    assert (Path(result["snapshot"]) / "manifest.json").exists()
    assert gone(children)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 75)])
def test_a_signal_during_the_start_saves_and_says_so(shards, tmp_path, number, code):
    """The worker is Python that has only just begun; its first updates are done before it ends."""
    run = subprocess.Popen([sys.executable, "-m", "forge.train", *TINY, *shards, "steps=100000", "snapshot=inline",
                            f"run_dir={tmp_path}/run"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    while not workers_of(run.pid):
        assert run.poll() is None, run.stderr.read()
    run.send_signal(number)
    out, err = run.communicate(timeout=60)
    assert run.returncode == code, err
    assert "Traceback" not in err + out
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["status"] == "stopped" and 1 <= result["steps"] <= 3
    assert (Path(result["snapshot"]) / "manifest.json").exists()


def test_workers_die_with_the_launcher(shards, tmp_path):
    run = started(tmp_path / "run", *shards, "hardware.processes=2", "micro_batch=2")
    children = workers_of(run.pid)
    run.kill()
    run.wait()
    assert gone(children)


def test_a_killed_worker_ends_the_run_and_is_named(shards, tmp_path):
    run = started(tmp_path / "run", *shards, "hardware.processes=2", "micro_batch=2")
    children = workers_of(run.pid)
    os.kill(children[1], signal.SIGKILL)
    _, err = run.communicate(timeout=60)
    assert run.returncode == 1
    assert "worker 1 was ended by signal 9" in err and "Traceback" not in err
    assert gone(children)


def test_a_failing_worker_ends_the_run_with_its_own_error(shards, tmp_path):
    folder = tmp_path / "outside" / "conf" / "augment"
    folder.mkdir(parents=True)
    (folder / "fails.yaml").write_text("_target_: faulty.Faulty\n")
    (tmp_path / "outside" / "faulty.py").write_text(
        "import atexit, os, pathlib\nfrom dataclasses import dataclass\n\n@dataclass(frozen=True)\nclass Faulty:\n"
        "    def read(self, batch):\n        return batch\n\n"
        "    def __call__(self, batch):\n"
        "        if os.environ['RANK'] == '1':\n"
        f"            atexit.register(pathlib.Path({str(tmp_path / 'hooks')!r}).touch)\n"
        "            raise ValueError('the second rank is broken')\n"
        "        return batch\n")
    done = train_apart(tmp_path / "run", *shards, "hardware.processes=2", "micro_batch=2", "augment=fails",
                       "dataloader=webdataset", "dataloader.workers=1", "allowed_packages=faulty",
                       "--config-dir", str(tmp_path / "outside" / "conf"),
                       env={"PYTHONPATH": str(tmp_path / "outside")})
    assert done.code == 1
    assert "worker 1: ValueError: the second rank is broken" in done.err
    assert "Traceback" not in done.err
    assert "Traceback" in (tmp_path / "run" / "log.txt").read_text()
    assert not (tmp_path / "hooks").exists(), "exit hooks may wait for collectives that never end"
    assert gone(processes_on(tmp_path / "run")), "its data workers are left"


def test_a_sweep_runs_each_value_in_a_folder_of_its_own(shards, tmp_path):
    done = forge("train", "-m", *TINY, *shards, "hardware.processes=2", "micro_batch=2", "comm.bucket_cap_mb=1,5,25",
                 f"run_dir={tmp_path}/sweep", timeout=200)
    assert done.returncode == 0, done.stderr
    results = sorted((tmp_path / "sweep").glob("*/result.json"))
    assert len(results) == 3
    losses = {json.loads(path.read_text())["loss_last"] for path in results}
    assert len(losses) == 1, "bucket sizes change no bit at two ranks"
    for value in (1, 5, 25):
        assert f"comm.bucket_cap_mb={value}" in done.stdout


def test_torchrun_trains_over_two_nodes(shards, tmp_path):
    frozen = forge("train", *TINY, *shards, "launch=torchrun", "micro_batch=2", f"run_dir={tmp_path}/run")
    assert frozen.returncode == 0 and "torchrun --nnodes=2" in frozen.stdout
    port = 29400 + os.getpid() % 1000
    agents = [subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=c10d",
         f"--rdzv-endpoint=127.0.0.1:{port}", "-m", "forge.worker", f"{tmp_path}/run"],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) for _ in range(2)]
    said = [agent.communicate(timeout=120)[0] for agent in agents]
    assert [agent.returncode for agent in agents] == [0, 0], said
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["device"]["count"] == 2 and result["steps"] == 6
    alone = train_apart(tmp_path / "alone", *shards, "micro_batch=2")
    assert result["loss_last"] == pytest.approx(alone.result["loss_last"], rel=1e-5)


def test_forge_train_inside_torchrun_says_what_to_do():
    done = forge("train", env={"TORCHELASTIC_RUN_ID": "x"})
    assert done.returncode == 2 and "forge.worker" in done.stderr
