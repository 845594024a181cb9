"""What is typed wrong, and machines that cannot be measured: a sentence, the right exit code, and nothing half done."""

import json
import sys
import time
from pathlib import Path

import pytest
from simulated import composed

from forge.bench import surroundings
from forge.bench.__main__ import main
from forge.bench.record import Record
from forge.bench.request import quoted
from forge.errors import Exit

CPU = "hardware=cpu"


@pytest.fixture
def typed(monkeypatch, tmp_path, capfd):
    """python -m forge.bench WORDS in this process and in an empty folder: (exit code, what was said)."""
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")         # the command sets it: restored afterwards
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")

    def bench(*words):
        monkeypatch.setattr(sys, "argv", ["forge.bench", *words])
        with pytest.raises(SystemExit) as ended:
            main()
        said = "".join(capfd.readouterr())
        assert "Traceback" not in said
        assert not list(Path().rglob("*")), "nothing was written"
        return ended.value.code, said

    return bench


@pytest.mark.parametrize(("words", "said"), [
    (["bench=ablaton"], "bench=ablaton is not an option. Did you mean 'ablation'?"),
    (["bench.timing.blcks=4"],
     "bench.timing.blcks is not a setting of bench=ablation. Did you mean 'bench.timing.blocks'"),
    (["bench.timing.blocks=3"], "bench.timing.blocks=3: at least 4 is wanted."),
    (["bench.timing.blocks=many"], "bench.timing.blocks='many': a whole number is wanted."),
    (["bench.timing.seconds=0"], "bench.timing.seconds=0.0: more than 0 is wanted."),
    (["bench.timing.warmup=200"], "bench.timing.warmup_most=100 is less than bench.timing.warmup=200"),
    (["bench.max_floor=0"], "bench.max_floor=0.0: more than 0 is wanted"),
    (["bench.switches=[]"], "bench.switches=[]: name one at least"),
    (["bench.switches=[loss=plain,loss=plain]"], "bench.switches names loss=plain more than once"),
    (["bench.switches=compile=blocks"], "is no list: write 'bench.switches=[...]', as in 'bench.switches=[compile="),
    (["bench.switches=[loss=']"], "is no list: write 'bench.switches=[...]'"),
    (["bench.switches=[a=[1]"], "with every quote and bracket closed"),
    (["bench.switches=[a=1],b=[1]"], "with every quote and bracket closed"),
    (["bench.switches=null"], "bench.switches=null is no list"), (["bench.path=x"], "bench.path=x is no list"),
    (["bench.timing=null"], "bench.timing=null: its parts are settings of their own"),
    (["bench.verify_seconds=0"], "bench.verify_seconds=0.0: more than 0 is wanted"),
    (["run_dir="], "run_dir names no folder"), (["run_dir=null"], "run_dir names no folder"),
    (["bench=path", "bench.path=[loss=plain]"], "two steps at least are wanted"),
    (["bench=path", "bench.resident=4", "bench.path=[a=1,b=1]"], "bench.resident=4: one of 2, 3 is wanted."),
    (["bench=micro", "bench.families=[matmull]"], "Did you mean 'matmul'?"),
    (["bench=micro", "bench.dropouts=[1.5]"], "probabilities, below 1, are wanted"),
    (["resume=somewhere"], "Take their settings from a run with from=somewhere"),
    (["--cfg=job"], "--cfg=job is not a flag of this command"),
    (["ablation"], "'ablation' is not an override: SETTING=VALUE or GROUP=OPTION is wanted."),
])
def test_the_command_s_own_words(typed, words, said):
    code, told = typed(CPU, *words)
    assert code == Exit.USAGE and said in told


@pytest.mark.parametrize(("words", "said"), [
    (["attention=flsh"], "attention=flsh is not an option. Did you mean 'flash'?"),
    (["model.wdth=3"], "model.wdth is not a setting. Did you mean 'model.width'?"),
    (["global_batch=0"], "the baseline does not run: global_batch=0: at least 1 is wanted."),
    (["bench.switches=[attention=flsh]"],
     "bench.switches: attention=flsh: attention=flsh is not an option. Did you mean 'flash'"),
    (["bench.switches=[loss=plain,modle=x]"], "bench.switches: modle=x: modle is not a setting. Did you mean 'model'?"),
    (["bench.switches=[model.width=wide]"],
     "bench.switches: model.width=wide: model.width='wide': a whole number is wanted."),
    (["bench.switches=[fast]"], "'fast' is not an override"),
    (["bench.switches=[global_batch=0]"], "bench.switches: global_batch=0: global_batch=0: at least 1 is wanted."),
    (["bench.switches=[hardware.processes=0]"], "hardware.processes=0: at least 1 is wanted."),
    (["bench.switches=['']"], "'' holds no words"), (["bench.switches=[' ',loss=plain]"], "holds no words"),
    (["bench.switches=[loss=chunked,]"], "holds no words"),
    *((["bench.switches=[" + word + "]"], f"{word} is no training setting") for word in (
        "resume=x", "from=x", "run_dir=x", "allowed_packages=x", "+run_dir=x", "hydra.run.dir=x", "bench.most=1")),
    (["bench.switches=[loss=chunked --cfg=job]"], "--cfg=job is a flag"),
    (["bench=path", "bench.path=[loss=plain,steps=0]"], "bench.path: steps=0: steps=0: at least 1 is wanted"),
    (["bench=path", "bench.path=[loss=plain,experiment=nothing]"], "bench.path: experiment=nothing: "),
    (["bench.micro=nowhere"], "bench.micro=nowhere cannot be read"),
])
def test_the_words_of_baseline_and_switches(typed, words, said, monkeypatch):
    monkeypatch.setattr("forge.bench.trial.training_settings", composed)
    code, told = typed(CPU, *words)
    assert code == Exit.USAGE and said in told, told


def test_a_record_is_not_overwritten(typed, tmp_path):
    (tmp_path / "result.json").write_text("{}")
    code, said = typed(CPU, f"run_dir={tmp_path}")
    assert code == Exit.USAGE and "already holds a record: name another" in said


def test_a_folder_that_cannot_be_written_is_named(typed, tmp_path):
    (tmp_path / "file").write_text("")
    code, said = typed(CPU, f"run_dir={tmp_path}/file/record")
    assert code == Exit.ENVIRONMENT and "cannot be written" in said


def test_help_names_every_option(typed):
    code, said = typed("--help")
    assert code == 0
    conf = Path(__file__).parents[2] / "conf/bench"
    assert all(f"bench={path.stem}" in said for path in conf.glob("*.yaml"))


def test_no_picture_without_matplotlib_and_none_of_something_else(typed, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    code, said = typed(f"draw={tmp_path}")
    assert code == Exit.USAGE and "holds no record that can be read" in said
    (tmp_path / "result.json").write_text(json.dumps({"schema": "other"}))
    code, said = typed(f"draw={tmp_path}")
    assert code == Exit.USAGE and "its schema is not forge.bench/1" in said
    (tmp_path / "result.json").write_text(json.dumps({"schema": "forge.bench/1", "mode": "aa", "rows": []}))
    code, said = typed(f"draw={tmp_path}")
    assert code == Exit.ENVIRONMENT and "pip install 'forge-switchboard[bench]'" in said


@pytest.mark.parametrize(("word", "becomes"), [
    ("bench.timing.blocks=5", "bench.timing.blocks=5"),
    ("bench.switches=[a,b]", "bench.switches=[a,b]"),
    ("bench.switches=[a=1,'b=2 c=3', d=[x,y] e={f: 1}]", "bench.switches=['a=1','b=2 c=3','d=[x,y] e={f: 1}']"),
    ("bench.switches=[a=1,]", "bench.switches=['a=1','']"), ("bench.switches=[a=1,'']", "bench.switches=['a=1','']"),
    ("bench.switches=[\"a='x, y'\"]", r"bench.switches=['a=\'x, y\'']"),
])
def test_lists_of_words_are_put_in_hydra_s_terms(word, becomes):
    assert quoted(word) == becomes


# ---- a machine with GPUs, as its nvidia-smi tells

SMI = """#!/bin/sh
case "$1" in
  --query-gpu=*) echo "NVIDIA H200, GPU-1, 580.1, 1980, 3201, 1980, 120.5, 700.00, 41, {used}, 0, 0x0000000000000024";;
  *) {apps};;
esac
"""


@pytest.fixture
def machine(monkeypatch, tmp_path):
    def with_gpu(used="520", apps="true"):
        program = tmp_path / "nvidia-smi"
        program.write_text(SMI.format(used=used, apps=apps))
        program.chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path), prepend=":")

    return with_gpu


def test_a_gpu_that_others_use_is_not_measured(typed, machine):
    machine(apps='echo "GPU-1, 4711, 10240, python, of somebody"')
    code, said = typed("hardware=gpu")
    assert code == Exit.ENVIRONMENT
    assert "GPU 0 (NVIDIA H200) is in use by process 4711 (python, of somebody, 10240 MiB)" in said
    assert typed("hardware=gpu", "bench.switches=[]")[0] == Exit.USAGE, "what is typed comes first"


def test_memory_that_nobody_seen_holds_is_told_as_well(typed, machine):
    machine(used="30000")
    code, said = typed("hardware=gpu")
    assert code == Exit.ENVIRONMENT and "has 30000 MiB in use by a process that is not seen" in said


def test_clocks_power_and_what_slows_a_device_down_are_read(machine):
    machine()
    (device,) = surroundings.devices()
    assert device["sm_mhz"] == 1980 and device["watts_limit"] == 700 and device["processes"] == []
    assert device["throttling"] == ["power limit", "software thermal limit"]


def test_devices_are_looked_at_while_they_work(machine, monkeypatch, tmp_path):
    machine()
    monkeypatch.setattr("forge.bench.record.LOOK_SECONDS", 0.01)
    record = Record.begun(tmp_path / "record", "aa", [], {})
    with record.watched():
        time.sleep(0.5)
    assert len(record.looks) > 3 and record.throttling() == ["power limit", "software thermal limit"]
    written = json.loads((tmp_path / "record/result.json").read_text())
    assert written["surroundings"][0]["devices"][0]["watts_limit"] == 700


def test_nothing_is_made_up_without_nvidia_smi(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert surroundings.devices() is None and surroundings.look()["load_average"] is not None
    assert surroundings.reasons("[N/A]") is None
