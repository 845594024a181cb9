"""scripts/measure_gpu.sh and the table at its end, without measuring anything."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
CALLS = [("kernels", "tune", "experts"), ("large", "verify"), ("moe_train", "path")]
PARTS = {"kernels": ["kernels"], "tune": ["tune"], "experts": ["experts", "experts_losses"],
         "moe_train": ["moe_fused", "moe_sorted", "moe_loop"],
         "large": ["micro", "gpt2_1558m", "llama_1b", "telemetry", "compile"], "path": ["path"]}


def measure(*words, **environment):
    return subprocess.run(["bash", ROOT / "scripts/measure_gpu.sh", *words], capture_output=True, text=True, timeout=60,
                          env=os.environ | {"PYTHON": sys.executable, **environment})


def test_a_part_that_is_none_is_said(tmp_path):
    done = measure(tmp_path, "kernels", "kernles")
    assert done.returncode == 2 and "kernles is not a part: kernels, tune, experts, " in done.stderr
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


def test_the_parts_of_a_call_fit_into_its_seconds():
    """By the table of the header, whose limits are those of the commands."""
    text = (ROOT / "scripts/measure_gpu.sh").read_text()
    most = int(re.search(r"SECONDS_IN_ALL:-(\d+)", text).group(1))
    limits = {name: int(limit) for name, limit in re.findall(r"^#[ 0-9-]{1,9} (\w+) +(\d+) +(?:\d+|-) ", text, re.M)}
    commands = dict(re.findall(r"^(\w+)\(\) \{\n(.*?)^\}", text, re.M | re.S))
    for part in ("kernels", "tune", "experts", "large", "path"):
        found = re.findall(r"(?:tests|limited|forge|bench) \w+ (\d+) ", commands[part])
        assert sum(map(int, found)) == limits[part], part
    assert most < 9.5 * 60 and all(sum(limits[part] for part in call) <= most for call in CALLS), limits


def test_patience_ends_with_the_time_that_there_is(tmp_path):
    """A setting that is none stops each before it begins."""
    measure(tmp_path, "experts", "path", EXTRA="no_setting=1", SECONDS_IN_ALL="100", PATH_STEPS="0 14")
    for name, setting in (("experts", "bench.patience"), ("path", "bench.timing.patience")):
        words = (tmp_path / f"{name}.command").read_text().split()
        patience = [int(word.partition("=")[2]) for word in words if word.startswith(f"{setting}=")]
        assert len(patience) == 1 and 10 <= patience[0] <= 100, words


def test_an_earlier_call_is_taken_over_with_its_tilings(tmp_path):
    """In a copy of the scripts, whose tilings nobody reads."""
    before, out, copy = tmp_path / "before", tmp_path / "out", tmp_path / "forge_copy"
    shutil.copytree(ROOT / "scripts", copy / "scripts")
    (copy / "forge/kernels/tilings").mkdir(parents=True)
    (before / "tune").mkdir(parents=True)
    (before / "tune/sm_90.json").write_text("{}\n")
    (before / "kernels.code").write_text("0\n")
    (before / "kernels.log").write_text("93 passed\n")
    before.chmod(0o555)
    done = subprocess.run(["bash", copy / "scripts/measure_gpu.sh", out, "kernels"], capture_output=True, text=True,
                          env=os.environ | {"PYTHON": sys.executable, "BEFORE": str(before)}, timeout=60)
    before.chmod(0o755)
    assert "kernels is there already" in done.stdout and "93 passed" in done.stdout, done.stderr
    assert (copy / "forge/kernels/tilings/sm_90.json").read_text() == "{}\n"


def test_without_wheels_sonic_is_said_and_left_out(tmp_path):
    assert "SONIC names no folder of wheels" in measure(tmp_path, "sonic", SONIC="").stdout
    done = measure(tmp_path, "sonic", SONIC=str(tmp_path / "wheels"))
    assert "sonic_install ended with exit code 1" in done.stdout
    assert sorted(path.name for path in tmp_path.glob("*.code")) == ["sonic_install.code"]


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
