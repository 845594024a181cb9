"""scripts/measure_gpu.sh and the table at its end, without measuring anything."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PARTS = {"kernels": ["kernels"], "experts": ["experts"], "moe_train": ["moe_fused", "moe_sorted", "moe_loop"],
         "large": ["micro", "gpt2_1558m", "llama_1b", "telemetry", "compile"], "path": ["path"]}


def measure(*words, **environment):
    return subprocess.run(["bash", ROOT / "scripts/measure_gpu.sh", *words], capture_output=True, text=True, timeout=60,
                          env=os.environ | {"PYTHON": sys.executable, **environment})


def test_a_part_that_is_none_is_said(tmp_path):
    done = measure(tmp_path, "kernels", "kernles")
    assert done.returncode == 2 and "kernles is not a part: kernels, experts, " in done.stderr
    assert not list(tmp_path.iterdir())


def test_what_no_time_is_left_for_is_said_and_not_run(tmp_path):
    done = measure(tmp_path, *PARTS, SECONDS_IN_ALL="-5")
    assert done.returncode == 0, done.stderr
    rows = [line.split() for line in done.stdout.splitlines() if line.endswith("no time  -")]
    assert sorted(row[0] for row in rows) == sorted(name for names in PARTS.values() for name in names)
    assert not list(tmp_path.glob("*.log"))


def test_a_command_that_ended_well_is_not_run_again_and_one_that_did_not_is(tmp_path):
    (tmp_path / "kernels.code").write_text("0\n")
    (tmp_path / "moe_fused.code").write_text("5\n")
    done = measure(tmp_path, "kernels", "moe_train", EXTRA="no_setting=1")
    assert "kernels is there already" in done.stdout and not (tmp_path / "kernels.log").exists()
    assert (tmp_path / "moe_fused.code").read_text() == "2\n"
    assert "no_setting" in (tmp_path / "moe_fused.log").read_text()
    assert "olmoe_1b moe_router=fused" in (tmp_path / "moe_fused.command").read_text()


def test_mfu_of_the_measured_rate(tmp_path):
    """0.4 of a datasheet's 1000 TFLOP/s is half of a measured 800."""
    micro = {"schema": "forge.bench/1", "mode": "micro", "device": {"peak_flops": 1e15},
             "rows": [{"name": "square", "flops_per_second": 8e14}, {"name": "small", "flops_per_second": None}]}
    trained = {"tokens_per_second": 61000.0, "step_ms": {"median": 12.5}, "mfu": 0.4, "peak_memory_bytes": 5e9,
               "loss_first": 10.8, "loss_last": 4.5, "steps": 60, "status": "finished"}
    for name, record in {"micro": micro, "llama_1b": trained}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "result.json").write_text(json.dumps(record))
        (tmp_path / f"{name}.code").write_text("0\n")
    done = subprocess.run([sys.executable, ROOT / "scripts/measured.py", tmp_path], capture_output=True, text=True)
    assert "best product square: 800 TFLOP/s" in done.stdout, done.stderr
    assert "61,000 tokens/s, step 12.5 ms, MFU 40.0%, of the measured rate 50.0%, 5.0 GB" in done.stdout
    assert (tmp_path / "table.txt").read_text() == done.stdout
