"""Real arms: processes that train when they are told to."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from conftest import composed
from planted import plant
from simulated import rows_of

from forge.bench.__main__ import run
from forge.bench.resident import Arm
from forge.bench.trial import Trial
from forge.config import realise
from forge.errors import Exit

SMALL = ["hardware=cpu", "model.width=16", "model.layers=1", "model.heads=1", "model.kv_heads=1", "model.head_width=16",
         "model.hidden=16", "model.routing.num_experts=2", "sequence_length=16", "global_batch=4"]
QUICK = ["bench.timing.blocks=4", "bench.timing.spare=0", "bench.timing.steps=4", "bench.timing.seconds=0.01",
         "bench.timing.warmup=3", "bench.timing.settle=1", "bench.timing.patience=60"]

SLEEPS = """
import time
from dataclasses import dataclass

@dataclass(frozen=True)
class Option:
    seconds: float
    def read(self, batch):
        return batch

    def __call__(self, batch):
        time.sleep(self.seconds)
        return batch
"""

BREAKS = """
import os
from dataclasses import dataclass

calls = []

@dataclass(frozen=True)
class Option:
    at: int
    def read(self, batch):
        return batch

    def __call__(self, batch):
        calls.append(batch)
        if len(calls) == self.at:
            raise ValueError("broken on purpose")
        return batch

    def problems(self, config):
        if self.at == 0 and "RANK" in os.environ:       # in the arm, and not in whoever checks it before
            os._exit(7)
        return iter(())
"""


@pytest.fixture(scope="module")
def planted(tmp_path_factory):
    """Words that make options known which sleep, break and die."""
    folder = tmp_path_factory.mktemp("planted")
    names = [plant(folder, "augment", "sleeps", SLEEPS, seconds=0.03), plant(folder, "augment", "breaks", BREAKS, at=2)]
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        patch.setenv("PYTHONPATH", os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", str(Path.cwd()))]))
        yield ["--config-dir", f"{folder}/conf", f"allowed_packages=[{','.join(names)}]"]


def test_a_slow_option_is_slower_and_broken_ones_are_rows(planted, shards, tmp_path, capfd):
    """Steps of 30 ms that sleep, and slow ones of twice that: no noise of a busy machine hides it."""
    switches = "bench.switches=[augment.seconds=0.06,augment=breaks,augment=breaks augment.at=0]"
    code = run([*planted, *SMALL, *shards, "augment=sleeps", *QUICK, switches, "bench.max_floor=1.0",
                "bench.verify=false", f"run_dir={tmp_path}/record"])
    result = json.loads((tmp_path / "record/result.json").read_text())
    rows = rows_of(result)
    said = capfd.readouterr()
    assert code == Exit.ANSWERED, said
    slow, baseline = rows["augment.seconds=0.06"], rows["baseline"]
    assert slow["verdict"] == "slower" and -0.7 < slow["gain"]["estimate"] < -0.2, slow
    assert baseline["step_ms"] > 30 and baseline["startup_seconds"] > 0.03 and baseline["peak_memory_bytes"] > 1e7
    assert sum(baseline["phases_ms"].values()) == pytest.approx(
        1e3 * baseline["tokens_per_step"] / baseline["tokens_per_second"], rel=0.02), "phases partition the step"
    assert baseline["mfu"] is None and rows["baseline again"]["verdict"] in ("not proven", "faster", "slower")
    assert "ValueError: broken on purpose" in rows["augment=breaks"]["reason"]
    assert "ended with exit code 7" in rows["augment=breaks augment.at=0"]["reason"]
    assert rows["all"]["status"] == "failed" and "augment.seconds is not a setting" in rows["all"]["reason"]
    assert "step 2 of 8: augment.seconds=0.06: block 1 of 4" in said.err


@pytest.mark.parametrize(("number", "code", "status"), [
    (signal.SIGINT, Exit.INTERRUPTED, "interrupted"), (signal.SIGTERM, Exit.STOPPED, "stopped")])
def test_a_signal_leaves_what_was_measured_and_no_arm(shards, tmp_path, number, code, status):
    command = subprocess.Popen(
        [sys.executable, "-m", "forge.bench", *SMALL, *shards, "bench=aa", "bench.timing.blocks=1000",
         f"run_dir={tmp_path}/record"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    for line in command.stderr:
        if "block 1 of" in line:
            break
    arms = [int(path.name) for path in Path("/proc").glob("[0-9]*") if is_arm(path, tmp_path)]
    assert len(arms) == 2
    command.send_signal(number)
    out, err = command.communicate(timeout=60)
    deadline = time.monotonic() + 10
    while any(Path(f"/proc/{arm}").exists() for arm in arms) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(is_arm(Path(f"/proc/{arm}"), tmp_path) for arm in arms)
    result = json.loads((tmp_path / "record/result.json").read_text())
    assert command.returncode == code == result["exit_code"], err
    assert result["status"] == status and "Traceback" not in err and "Record" in out
    assert (tmp_path / "record/report.md").exists()


def is_arm(process, folder):
    try:
        line = (process / "cmdline").read_bytes()
    except OSError:
        return False
    return b"forge.bench.arm" in line and str(folder).encode() in line


@pytest.mark.dist
def test_two_ranks_sum_and_are_one_arm(shards, tmp_path):
    code = run([*SMALL, *shards, "hardware.processes=2", "hardware.threads=1", "bench=micro",
                "bench.families=[all_reduce,loader]", "bench.seconds=0.05", "bench.all_reduce_bytes=[8,65536]",
                "bench.updates=4", f"run_dir={tmp_path}/record"])
    result = json.loads((tmp_path / "record/result.json").read_text())
    rows = rows_of(result)
    assert code == Exit.ANSWERED and result["device"]["count"] == 2
    large = rows["65,536 bytes"]
    assert large["bus_bytes_per_second"] == large["algorithm_bytes_per_second"] > 0, "2 (n - 1) / n is 1 for two"
    assert large["backend"] == "gloo" and len(large["samples_ms"]) == large["ms"]["calls"] >= 5
    loaded = rows["as a run reads"]
    assert loaded["headroom"] == pytest.approx(loaded["rows_per_second"] / loaded["model_rows_per_second"])


def test_what_the_machine_can_do_is_measured_or_said_not_to_be(shards, tmp_path, capsys):
    code = run([*SMALL, *shards, "bench=micro", "bench.seconds=0.01", "bench.copy_mb=[1]", "bench.updates=3",
                "bench.square_sizes=[64,8192]", "bench.shard_mb=2", f"run_dir={tmp_path}/record"])
    result = json.loads((tmp_path / "record/result.json").read_text())
    rows = rows_of(result)
    assert code == Exit.ANSWERED
    square = rows["square 64 float32"]
    assert square["flops_per_second"] == pytest.approx(2 * 64**3 / square["ms"]["median"] * 1e3)
    assert "would take" in rows["square 8192 float32"]["reason"] and "ms" not in rows["square 8192 float32"]
    products = [row for row in result["rows"] if "in_an_update" in row]
    assert products and sum(row["share_of_products"] for row in products) <= 1 + 1e-9
    assert "aten::bmm" in rows["eager, dropout 0"]["kernels"]
    assert any("flash" in kernel for kernel in rows["sdpa, dropout 0"]["kernels"])
    assert not any("flash" in kernel for kernel in rows["sdpa, dropout 0.1"]["kernels"]), "dropout rules it out"
    for name, why in (("host to device", "nothing crosses"), ("all sizes", "hardware.processes=2"),
                      ("a kernel in a CUDA graph", "GPUs only")):
        assert rows[name]["status"] == "not measured" and why in rows[name]["reason"]
    assert "all_reduce all sizes: one process" in capsys.readouterr().out


def test_an_arm_compiles_with_caches_of_its_own(monkeypatch, tmp_path):
    """Or the first arm of a bench would pay for all that follow."""
    started = []

    def start(command, env, **rest):
        started.append(env)
        raise OSError("enough is seen")

    monkeypatch.setattr(subprocess, "Popen", start)
    trial = Trial("arm", [], tmp_path, None, realise(composed(*SMALL)), None)
    for cold in (True, True, False):
        with pytest.raises(OSError):
            Arm(trial, 1.0, cold, (), [])
    caches = [env.get("TORCHINDUCTOR_CACHE_DIR") for env in started]
    assert caches[0] != caches[1] and caches[2] == os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    assert started[0]["TRITON_CACHE_DIR"] != started[1]["TRITON_CACHE_DIR"]
    assert not Path(caches[0]).parent.exists(), "and leaves nothing"


# ---- the driver, in this process

@pytest.fixture(scope="module")
def driver(shards, tmp_path_factory):
    from forge.bench.driver import Driver
    from forge.build import build

    config = realise(composed(*SMALL, *shards, "evaluation=none", "snapshot=none", "tracker=[]", "tracker.every=2",
                              "steps=1000"))
    with config.hardware.claim() as topology, build(config, topology, tmp_path_factory.mktemp("driven")) as made:
        yield Driver(*made)


def test_what_passes_between_turns_belongs_to_no_step(driver):
    driver.turn(0, 3)
    time.sleep(0.3)
    turn = driver.turn(2, 5)
    assert len(turn["lengths"]) == 5 and len(turn["settling"]) == 2 and max(turn["lengths"]) < 250
    assert sum(turn["phases"].values()) == pytest.approx(sum(turn["lengths"]))
    assert turn["tokens"] == 5 * 4 * 16 and turn["wall_seconds"] * 1e3 >= sum(turn["lengths"])


def test_telemetry_can_be_left_out_and_comes_back(driver):
    records = driver.run.ledger.path
    driver.turn(0, 2)  # the ledger's file exists from its first record on, whichever tests ran before
    before = len(records.read_text().splitlines())
    off = driver.untold(0, 4, telemetry=False)
    assert len(records.read_text().splitlines()) == before and not driver.run.phases._marks
    on = driver.untold(0, 4, telemetry=True)
    assert len(records.read_text().splitlines()) == before + 2
    assert off["tokens"] == on["tokens"] == 4 * 4 * 16 and len(off["lengths"]) == 4
    assert len(driver.turn(0, 2)["lengths"]) == 2


def test_products_of_an_update_are_those_that_torch_counts(driver):
    from torch.utils.flop_counter import FlopCounterMode

    from forge.bench.probes.matmul import PRODUCTS, Recorder

    with Recorder() as recorder, FlopCounterMode(display=False) as counter:
        driver.turn(0, 1)
    counted = {str(op): flops for op, flops in counter.get_flop_counts()["Global"].items()}
    mine: dict[str, float] = {}
    for product in recorder.products.values():
        kind = str(product.function).split(".")[1]
        mine[kind] = mine.get(kind, 0) + product.flops * product.count
        assert product.prepared(torch.device("cpu"))() is not None
    assert mine.keys() <= PRODUCTS and any(op.endswith("mm") for op in counted)
    for op, flops in counted.items():
        if op.removeprefix("aten.") in PRODUCTS - {"_grouped_mm"}:
            assert mine[op.removeprefix("aten.")] == flops
