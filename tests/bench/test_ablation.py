"""bench=ablation, aa and path: what becomes of the turns."""

import errno
import json
import math
from pathlib import Path

import pytest
from simulated import Machine, bench, rows_of

from forge.bench.ablation import ALL, overlap
from forge.bench.turns import Turn, mirrored, take_blocks
from forge.errors import Exit

SWITCHES = "bench.switches=[attention=eager,operators=handwritten,loss=chunked]"
SPEEDS = {"attention=eager": 1.25, "operators=handwritten": 0.8, "loss=chunked": 1.0}


@pytest.fixture
def on(monkeypatch, tmp_path):
    return lambda machine, *words: bench(monkeypatch, tmp_path / "record", machine, *words)


def test_each_switch_is_measured_alone_together_and_left_out(on, capsys):
    code, result = on(Machine(SPEEDS), SWITCHES)
    rows = rows_of(result)
    assert code == Exit.ANSWERED and result["status"] == "finished" and result["schema"] == "forge.bench/1"
    assert [row["kind"] for row in result["rows"]] == ["baseline", "a/a", *["alone"] * 3, "all", *["left out"] * 3]
    assert rows["attention=eager"]["verdict"] == "slower" and rows["operators=handwritten"]["verdict"] == "faster"
    assert rows["attention=eager"]["gain"]["estimate"] == pytest.approx(1 / 1.25 - 1, abs=0.01)
    assert rows["loss=chunked"]["verdict"] == "not proven" and rows["all"]["verdict"] == "not proven"
    assert rows["without attention=eager"]["gain"]["estimate"] == pytest.approx(0.25, abs=0.01)
    assert rows["without operators=handwritten"]["against"] == "all"
    assert rows["without operators=handwritten"]["verdict"] == "slower"
    assert result["floor"] < result["smallest_provable_gain"] + 1e-9 < 0.01
    assert result["overlap"]["product_of_singles"] == pytest.approx(result["overlap"]["all"], abs=0.01)
    assert result["overlap"]["verdict"] == "not proven", "all together gain nothing"
    shown = capsys.readouterr().out
    assert "operators=handwritten" in shown and "faster" in shown and "unverified" in shown
    assert "help each other cannot be told from this noise" in shown


def gained(kind, log_mean, verdict, half=0.01, name=ALL):
    return {"kind": kind, "name": name, "status": "measured", "verdict": verdict,
            "gain": {"estimate": math.expm1(log_mean), "log_mean": log_mean, "log_half_width": half}}


@pytest.mark.parametrize(("singles", "together", "verdict", "floor", "found"), [
    ([0.2, 0.2], 0.3, "faster", 0.01, "overlap"), ([0.2, 0.2], 0.5, "faster", 0.01, "help"),
    ([-0.2, -0.1], -0.1, "slower", 0.01, "help"), ([-0.2, -0.1], -0.1, "not proven", 0.01, "not proven"),
    ([0.2, 0.2], 0.385, "faster", 0.01, "not proven"), ([0.2, 0.2], 0.385, "faster", 0.001, "not proven"),
    ([0.2, 0.2], 0.38, "faster", 0.001, "overlap"), ([0.2, 0.2], 0.3, "faster", 0.1, "not proven"),
    ([0.2, 0.2], 0.3, "faster", None, "not proven")])
def test_switches_overlap_where_more_than_noise_says_so(singles, together, verdict, floor, found):
    rows = [*(gained("alone", single, "faster", name=str(place)) for place, single in enumerate(singles)),
            gained("all", together, verdict)]
    assert overlap(rows, floor)["verdict"] == found
    assert overlap(rows[:-1], floor) is None


def test_only_two_arms_hold_memory_at_once(on):
    machine = Machine(SPEEDS)
    on(machine, SWITCHES)
    assert machine.most_running == 2


def test_the_record_holds_every_step_and_the_whole_configuration(on, tmp_path):
    _, result = on(Machine(SPEEDS), "bench=aa", "bench.timing.blocks=5", "bench.timing.steps=7",
                   "bench.timing.seconds=0.01")
    (comparison,) = result["comparisons"]
    assert len(comparison["blocks"]) == 5
    assert comparison["blocks"][0]["order"] == ["baseline", "baseline again", "baseline again", "baseline"]
    assert all(len(turn["lengths"]) == 7 and len(turn["settling"]) == 2
               for block in comparison["blocks"] for turn in block["turns"])
    arm = result["arms"]["baseline"]
    assert arm["config"]["optimizer"]["lr"] > 0 and len(arm["config_sha256"]) == 64
    assert arm["config_sha256"] == result["arms"]["baseline again"]["config_sha256"]
    assert result["settings"]["timing"]["steps"] == 7 and result["versions"]["torch"]
    assert result["surroundings"][0]["load_average"] is not None
    assert "| baseline again |" in (tmp_path / "record/report.md").read_text()


def test_two_equal_baselines_prove_nothing_whatever_drifts(on):
    code, result = on(Machine(drift=0.002, noise=0.002), "bench=aa")
    row = rows_of(result)["baseline again"]
    assert code == Exit.ANSWERED and row["verdict"] == "not proven"
    assert result["floor"] == pytest.approx(math.expm1(max(abs(row["gain"]["log_mean"]) + row["gain"]["log_half_width"],
                                                           0)))


def test_a_machine_that_is_too_noisy_is_not_judged(on, capsys):
    code, result = on(Machine(SPEEDS, noise=0.1), SWITCHES)
    assert code == Exit.CANNOT_JUDGE == result["exit_code"] and result["abstained"]
    assert "more than bench.max_floor=0.02" in result["reason"] and "raise bench.max_floor" in result["reason"]
    assert all(row["verdict"] == "not proven" for row in result["rows"] if row["kind"] in ("alone", "all"))
    assert rows_of(result)["attention=eager"]["gain"], "what was measured is written all the same"
    assert "Not judged" in capsys.readouterr().out


def test_processes_that_differ_by_themselves_raise_the_floor(on):
    """Each process 1 % off, for as long as it lives: within one comparison nothing shows it."""
    _, result = on(Machine(between=0.01, noise=0.0001), "bench.switches=[loss=chunked]", "bench.max_floor=0.1")
    assert rows_of(result)["baseline again"]["verdict"] != "not proven"
    assert result["floor"] > 0.003 and result["smallest_provable_gain"] >= result["floor"]


@pytest.mark.parametrize(("error", "status"), [
    ("OutOfMemoryError: CUDA out of memory. Tried to allocate 3 GiB", "out of memory"),
    ("was ended by signal 9 (SIGKILL; often the kernel, out of memory).", "out of memory"),
    ("RuntimeError: a kernel is missing", "failed")])
def test_an_arm_that_fails_is_a_row_and_all_are_those_that_run(on, error, status):
    code, result = on(Machine(SPEEDS, fails={"attention=eager": ("start", error)}), SWITCHES)
    rows = rows_of(result)
    assert code == Exit.ANSWERED
    assert rows["attention=eager"]["status"] == status and error in rows["attention=eager"]["reason"]
    assert ("beside baseline 1.00 GB" in rows["attention=eager"]["reason"]) == (status == "out of memory")
    assert rows["all"]["status"] == status and rows["all that run"]["status"] == "measured"
    assert "without operators=handwritten" in rows and "without attention=eager" not in rows


def test_a_baseline_that_an_arm_took_along_is_started_again(on):
    machine = Machine(SPEEDS)
    machine.fails["hardware=cpu"] = (39, "OutOfMemoryError: CUDA out of memory")
    code, result = on(machine, SWITCHES)
    failed = [row for row in result["rows"] if row["status"] == "out of memory"]
    assert code == Exit.ANSWERED and len(failed) == 1 and "baseline failed beside it" in failed[0]["reason"]
    assert sum(row["status"] == "measured" for row in result["rows"]) > 6


def test_a_baseline_that_does_not_run_ends_the_bench_with_its_own_words(on, tmp_path):
    code, result = on(Machine(fails={"hardware=cpu": ("start", "RuntimeError: no such thing")}), SWITCHES)
    assert str(code) == "the baseline does not run: RuntimeError: no such thing" and code.exit_code == Exit.CRASHED
    assert result["status"] == "failed" and result["exit_code"] == Exit.CRASHED


def test_parts_that_do_not_fit_together_are_a_row(on, capsys):
    """moe_tiny has heads of 32, and rotary positions turn pairs."""
    _, result = on(Machine(SPEEDS), "bench.switches=[model.head_width=33,loss=chunked]")
    row = rows_of(result)["model.head_width=33"]
    assert "model.head_width=33 will not be measured: " in capsys.readouterr().err.splitlines()[0]
    assert row["status"] == "failed" and row["exit_code"] == Exit.USAGE and "make it even" in row["reason"]


def test_settings_that_the_baseline_has_already_are_said_to_be_the_same(on):
    _, result = on(Machine(SPEEDS), "bench.switches=[loss=plain,attention=eager]")
    assert rows_of(result)["loss=plain"]["status"] == "same settings"
    assert "without loss=plain" not in rows_of(result)


def test_other_numbers_of_tokens_are_compared_by_tokens_a_second(on):
    _, result = on(Machine({"global_batch=16": 1.6}), "bench.switches=[global_batch=16]")
    row = rows_of(result)["global_batch=16"]
    assert row["gain"]["estimate"] == pytest.approx(0.25, abs=0.01) and "compared by tokens a second" in row["reason"]


def test_an_interruption_leaves_what_was_measured(on, capsys):
    code, result = on(Machine(SPEEDS, fails={"any": (70, KeyboardInterrupt())}), SWITCHES)
    assert code == Exit.INTERRUPTED == result["exit_code"] and result["status"] == "interrupted"
    assert [row["kind"] for row in result["rows"]] == ["baseline", "a/a"]
    assert "baseline again" in capsys.readouterr().out


def test_a_disk_that_fills_up_is_told_and_what_was_measured_is_shown(on, monkeypatch, capsys):
    write, written = Path.write_text, []

    def full(path, text, *rest):
        if path.name == "result.partial":
            written.append(path)
            if len(written) > 2:
                raise OSError(errno.ENOSPC, "No space left on device", str(path))
        return write(path, text, *rest)

    monkeypatch.setattr(Path, "write_text", full)
    code, result = on(Machine(SPEEDS), SWITCHES)
    assert code.exit_code == Exit.ENVIRONMENT and "No space left on device" in str(code) and "run_dir=" in str(code)
    assert result["status"] == "running" and len(result["rows"]) == 2, "the last that could be written"
    assert "attention=eager" in capsys.readouterr().out


def test_the_record_goes_to_stdout_alone_with_json(on, capsys):
    on(Machine(SPEEDS), "bench=aa", "--json")
    assert json.loads(capsys.readouterr().out)["mode"] == "aa"


def test_a_path_compares_with_the_one_before_and_with_the_first(on):
    machine = Machine({"attention=eager": 0.8, "loss=chunked": 0.5, "operators=handwritten": 0.4},
                      fails={"model.width=64": ("start", "OutOfMemoryError: too large")})
    steps = "[loss=plain,attention=eager,model.width=64,loss=chunked attention=eager,operators=handwritten]"
    code, result = on(machine, "bench=path", f"bench.path={steps}")
    rows = rows_of(result)
    assert code == Exit.ANSWERED and machine.most_running == 3
    assert rows["attention=eager"]["gain"]["estimate"] == pytest.approx(0.25, abs=0.01)
    assert rows["model.width=64"]["status"] == "out of memory"
    after = rows["loss=chunked attention=eager"]
    assert after["against"] == "attention=eager", "the last one that ran"
    assert after["gain"]["estimate"] == pytest.approx(1.0, abs=0.02)
    assert after["over_first"]["estimate"] == pytest.approx(1.5, abs=0.03)
    assert rows["operators=handwritten"]["gain"]["estimate"] == pytest.approx(0.0, abs=0.01)
    assert rows["operators=handwritten"]["over_first"]["estimate"] == pytest.approx(1.5, abs=0.03)


def test_a_step_of_a_path_is_verified_against_what_it_was_held_against(on, monkeypatch):
    asked = []

    def prove(trial, baseline, seconds):
        asked.append((trial.name, baseline.name))
        return {"verify": "same maths", "verify_reason": None}

    monkeypatch.setattr("forge.bench.proof.prove", prove)
    _, result = on(Machine(fails={"model.width=64": ("start", "OutOfMemoryError: too large")}), "bench=path",
                   "bench.path=[loss=plain,attention=eager,model.width=64,loss=chunked]", "bench.verify=true")
    assert asked == [("attention=eager", "loss=plain"), ("loss=chunked", "attention=eager")]
    assert rows_of(result)["loss=chunked"]["verify"] == "same maths"


def test_a_path_can_hold_two_arms_only(on):
    machine = Machine({"attention=eager": 0.8})
    _, result = on(machine, "bench=path", "bench.path=[loss=plain,attention=eager,loss=chunked]", "bench.resident=2")
    rows = rows_of(result)
    assert machine.most_running == 2 and rows["loss=chunked"]["over_first"] is None
    assert rows["loss=chunked"]["gain"]["estimate"] == pytest.approx(-0.2, abs=0.01)


# ---- turns

class Drifting:
    """A side whose steps become longer with every turn that anybody takes."""

    clock = 0

    def __init__(self, name, disturbed=()):
        self.name, self.disturbed, self.taken = name, disturbed, 0

    def turn(self):
        Drifting.clock += 1
        self.taken += 1
        why = ["1 recompilations"] if self.taken in self.disturbed else []
        return Turn([100.0 + Drifting.clock], [], 1000.0, {}, 0.1, None, why)


def test_a_mirrored_order_gives_every_side_the_same_drift():
    assert mirrored("AB") == ["A", "B", "B", "A"] and mirrored("ABC") == list("ABCCBA")
    (block,) = take_blocks([Drifting("a"), Drifting("b"), Drifting("c")], 1, 0, lambda number, name: None)
    assert block.log_ratio("b", "a") == pytest.approx(0) and block.log_ratio("c", "a") == pytest.approx(0)


def test_a_disturbed_block_is_kept_and_replaced():
    taken = take_blocks([Drifting("a"), Drifting("b", disturbed=(3,))], 4, 2, lambda number, name: None)
    assert [bool(block.disturbances) for block in taken] == [False, True, False, False, False]
    assert taken[1].disturbances == ["b: 1 recompilations"]


def test_disturbances_without_end_end_the_attempts():
    taken = take_blocks([Drifting("a", disturbed=range(99))], 4, 2, lambda number, name: None)
    assert len(taken) == 6
