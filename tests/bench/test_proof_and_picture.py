"""What is asked of forge.verify, and what is drawn."""

import json
import os
import sys
import time
from pathlib import Path

import pytest
from simulated import Machine, Simulated, bench, rows_of

from forge.bench.__main__ import redraw
from forge.bench.plot import draw
from forge.bench.probes.attention import short
from forge.bench.proof import prove, training_words
from forge.bench.trial import Trial
from forge.errors import Exit

VERIFY = """#!/bin/sh
for word; do case "$word" in run_dir=*) place="${{word#run_dir=}}";; esac; done
mkdir -p "$place"; printf '%s\\n' "$@" > "$place/asked"
{answer}
"""


@pytest.fixture
def trials(tmp_path):
    flags = ["--config-dir", "my conf", "allowed_packages=[mine]"]
    make = lambda name, *words: Trial(name, [*flags, *words], tmp_path / name, None, None, None)    # noqa: E731
    return make("switch", "loss=chunked", "data.train=a b"), make("baseline", "data.train=a b")


@pytest.fixture
def verify(monkeypatch, tmp_path):
    """python -m forge.verify answers like this."""
    def answers(answer):
        program = tmp_path / "verify.sh"
        program.write_text(VERIFY.format(answer=answer))
        program.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(program))
        monkeypatch.setattr("forge.bench.proof.find_spec", lambda name: name)

    return answers


def test_the_verdict_of_verify_is_the_proof(trials, verify, tmp_path):
    verify("""echo '{"verdict": "differs", "reason": "head.weight differs"}' > "$place/result.json"; exit 3""")
    assert prove(*trials, 30.0) == {"verify": "differs", "verify_reason": "head.weight differs"}
    asked = (tmp_path / "switch/verify/asked").read_text().splitlines()
    assert asked[:2] == ["-m", "forge.verify"] and asked[2:7] == trials[0].words
    assert asked[7:] == ["baseline='data.train=a b'", f"run_dir={tmp_path}/switch/verify"]
    assert training_words(trials[1]) == ["data.train=a b"]


@pytest.mark.parametrize(("answer", "why"), [
    ("echo 'forge: no such thing.' >&2; exit 2", "ended with exit code 2: forge: no such thing."),
    ("echo 'forge: The candidate crashed: ValueError: x' >&2; echo 'The traceback is in y' >&2; exit 1",
     "ended with exit code 1: forge: The candidate crashed: ValueError: x"),
    ("echo 'forge: rank 1: x.' >&2; echo 'forge: The candidate could not be run (above).' >&2; exit 1",
     "ended with exit code 1: forge: rank 1: x."),
    ("printf 'Traceback:\\nValueError: y\\n' >&2; exit 1", "ended with exit code 1: ValueError: y"),
    ("exit 1", "ended with exit code 1."), ("exit 0", "left no verdict"),
    ("echo '[]' > $place/result.json", "left no verdict"),
    ("exec sleep 30", "took more than bench.verify_seconds=0.3")])
def test_no_verdict_is_said_to_be_none(trials, verify, answer, why):
    verify(answer)
    found = prove(*trials, 0.3)
    assert found["verify"] == "unverified" and why in found["verify_reason"]


def test_verify_dies_with_the_bench_and_what_it_started_with_it(trials, verify, tmp_path):
    """FORGE_PARENT is what forge.process.die_with_parent reads."""
    verify("""echo $FORGE_PARENT > "$place/parent"; sleep 30 & echo $! > "$place/child"; sleep 30""")
    prove(*trials, 0.5)
    place = tmp_path / "switch/verify"
    assert (place / "parent").read_text().strip() == str(os.getpid())
    child = Path(f"/proc/{(place / 'child').read_text().strip()}/stat")
    deadline = time.monotonic() + 5
    while child.exists() and ") Z" not in child.read_text() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not child.exists() or ") Z" in child.read_text()


@pytest.fixture
def record(monkeypatch, tmp_path):
    code, result = bench(monkeypatch, tmp_path / "record", Machine({"attention=eager": 1.3}),
                         "bench.switches=[attention=eager,loss=chunked]")
    assert code == Exit.ANSWERED
    return tmp_path / "record", result


def test_a_picture_is_drawn_or_its_absence_explained(record, monkeypatch):
    run_dir, result = record
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "matplotlib.figure", None)
        assert f"python -m forge.bench draw={run_dir}" in draw(result, run_dir)
    pytest.importorskip("matplotlib")
    (run_dir / "ablation.png").unlink(missing_ok=True)
    assert redraw(run_dir) == Exit.ANSWERED
    assert (run_dir / "ablation.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_the_record_says_where_it_has_no_picture(record):
    run_dir, result = record
    assert (result["picture_reason"] is None) == (run_dir / "ablation.png").exists()


def test_the_colour_says_what_a_bar_means_for_the_switch(monkeypatch, tmp_path):
    """A switch that is missed where it is left out is good news, though the bar says slower."""
    axes = pytest.importorskip("matplotlib.axes").Axes
    drawn, barh, legends = {}, axes.barh, []

    def noted(self, height, value, color, label, **more):
        drawn[height] = (color, label)
        return barh(self, height, value, color=color, label=label, **more)

    monkeypatch.setattr(axes, "barh", noted)
    monkeypatch.setattr("matplotlib.figure.Figure.legend", lambda self, **more: legends.append(
        self.axes[0].get_legend_handles_labels()[1]))
    cases = [("alone", "faster"), ("alone", "slower"), ("left out", "slower"), ("left out", "faster"),
             ("left out", "slower"), ("left out", "not proven")]
    rows = [{"name": f"{kind} {verdict}", "kind": kind, "verdict": verdict,
             "gain": {"estimate": 0.1, "low": None, "high": None}} for kind, verdict in cases]
    assert draw({"mode": "ablation", "rows": rows, "device": None, "processor": "x"}, tmp_path) is None
    assert [colour for colour, _ in drawn.values()] == ["tab:green", "tab:red", "tab:orange", "tab:purple",
                                                        "tab:orange", "tab:grey"]
    assert legends == [["faster", "slower", "slower without it: worth keeping", "faster without it: better left out",
                        "not proven"]]


@pytest.mark.parametrize(("kernel", "name"), [
    ("void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64, 128>, true>(Params)", "flash_fwd_kernel"),
    ("cudnn_generated_fort_native_sdpa_sm90", "cudnn_generated_fort_native_sdpa_sm90"),
    ("aten::bmm", "bmm")])
def test_kernels_are_called_by_their_own_names(kernel, name):
    assert short(kernel) == name


class Watching(Simulated):
    """Being watched costs 0.1 ms of each step."""

    def ask(self, do, telemetry=True, **rest):
        answer = super().ask(do, **rest)
        extra = 0.1 if do == "untold" and telemetry else 0.0
        return answer | {"lengths": [ms + extra for ms in answer["lengths"]]}


@pytest.mark.parametrize(("most", "verdict"), [(0.01, "below 1.0%"), (0.002, "above 0.2%")])
def test_the_cost_of_telemetry_is_a_share_of_a_step_of_20_ms(monkeypatch, tmp_path, most, verdict):
    machine = Machine(noise=0.0001)
    monkeypatch.setattr(machine, "arm", lambda trial, patience, cold, allowed, running: Watching(
        machine, trial, running))
    code, result = bench(monkeypatch, tmp_path / "record", machine, "bench=telemetry", f"bench.most={most}")
    (row,) = rows_of(result).values()
    assert code == Exit.ANSWERED and row["name"] == "marks, ledger, console, tensorboard"
    assert row["cost_ms"]["estimate"] == pytest.approx(0.1, abs=0.01)
    assert row["share_of_20_ms"]["estimate"] == pytest.approx(0.005, abs=0.0005) and row["verdict"] == verdict
    assert all(len(turn["lengths"]) % 10 == 0 for turn in result["comparisons"][0]["blocks"][0]["turns"])
    assert Path(tmp_path / "record/result.json").exists() and json.dumps(result)
