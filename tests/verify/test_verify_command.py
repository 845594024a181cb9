"""The command: what it writes, what it refuses, and how it ends."""

import json
import os
import signal

import pytest
import torch
from comparing import compare, compose_once
from conftest import TINY
from conftest import forge as run_command

import forge.verify.examine
from forge.errors import ConfigError, ForgeError
from forge.freeze import freeze
from forge.verify.__main__ import _terminate, main, verify
from forge.verify.run_side import Terminated


def test_the_record_says_what_was_compared_and_how(shards, tmp_path):
    answer = compare(tmp_path / "run", "operators=handwritten", common=shards)
    result = answer.result
    assert (result["schema"], result["status"], result["exit_code"]) == ("forge.verify/1", "finished", 0)
    assert result["changes"] == [{"setting": "operators", "baseline": "native", "candidate": "handwritten"}]
    assert result["configs"]["candidate"]["operators"]["_target_"] == "forge.operators.handwritten.Handwritten"
    assert result["versions"]["torch"] == torch.__version__
    maths = result["passes"]["maths"]
    assert [one["tied"] for one in maths["updates"]] == [False, True]
    assert {one["name"] for one in maths["tensors"]} >= {"embedding.weight", "blocks.1.feed_forward.gate.weight",
                                                         "head.weight", "expert_load"}
    assert maths["updates"][1]["loss"]["reference"] == pytest.approx(5.545, abs=0.05), "log(256) before training"
    assert maths["updates"][0]["loss"]["reference"] > 5.6, "and more with weights that say something"
    assert not (tmp_path / "run" / "scratch").exists()
    report = (tmp_path / "run" / "report.md").read_text()
    assert "same maths" in report and "operators = native -> handwritten" in report and "| maths |" in report


def test_from_a_run_is_the_starting_point_of_both(shards, tmp_path):
    """Its dropout is left out: two kernels would draw differently."""
    words = [*TINY, *shards, "model.layers=1", "model.dropout=0.1", f"run_dir={tmp_path}/run"]
    freeze(compose_once(words), tmp_path / "run")
    answer = compare(tmp_path / "verify", "attention=eager", run=tmp_path / "run")
    assert answer.verdict == "same maths"
    assert answer.result["changes"] == [{"setting": "attention", "baseline": "sdpa", "candidate": "eager"}]
    assert [answer.result["configs"][side]["model"]["layers"] for side in ("baseline", "candidate")] == [1, 1]


def test_an_option_the_model_has_no_use_for_is_said_to_have_none(shards, tmp_path):
    answer = compare(tmp_path / "run", "moe_router=loop", common=[*shards, "model.routing=null"])
    assert answer.verdict == "same bits"
    assert any("has no effect: model=moe_tiny has no experts" in note for note in answer.result["notes"])


def test_other_parameters_are_another_model_and_named(shards, tmp_path):
    answer = compare(tmp_path / "run", "model.layers=3", common=shards)
    assert (answer.code, answer.verdict) == (0, "differs by design: model.layers = 2 -> 3")
    assert "blocks.2" in answer.reason and "candidate's alone" in answer.reason
    answer = compare(tmp_path / "other", "model.hidden=48", common=shards)
    assert "is [4, 32, 32] in the baseline and [4, 32, 48] in the candidate" in answer.reason


def test_every_operation_of_the_reference_is_in_float64(shards, tmp_path, monkeypatch):
    """Two ways to compute the same, both in float64: anything that falls back to float32 leaves an error of 1e-8."""
    seen = []
    compared = forge.verify.examine.compared

    def keep(name, reference, baseline, candidate, rule):
        made = compared(name, reference, baseline, candidate, rule)
        seen.append([one.candidate for one in made.overall])
        return made

    def in_float64(self, side, names):
        return [self._job(side, name, precision="float64") for name in names]

    monkeypatch.setattr(forge.verify.examine, "compared", keep)
    monkeypatch.setattr(forge.verify.examine.Examination, "_passes", in_float64)
    common = [*shards, "model.init_std=0.2", "model.qk_norm=head", "model.routing.z_loss=0.01"]
    compare(tmp_path / "a", "attention=eager", "operators=handwritten", "moe_router=loop", "loss=chunked",
            common=common)
    dense = [*shards, "model.routing=null", "model.activation=gelu", "model.norm=layer", "model.rotary=null",
             "model.init_std=0.2"]
    compare(tmp_path / "b", "attention=eager", "operators=handwritten", common=dense)
    assert len(seen) == 2 and max(max(one) for one in seen) < 1e-13


def test_half_precision_differs_by_design_and_leaves_the_maths_alone(shards, tmp_path):
    answer = compare(tmp_path / "run", "precision=bf16", "attention=eager", common=shards)
    assert answer.verdict == "differs by design: precision = fp32 -> bf16"
    passes = answer.result["passes"]
    assert passes["maths"]["within_rule"] and passes["deployed"]["within_rule"]
    assert passes["deployed"]["compute"] == {"baseline": "bfloat16", "candidate": "bfloat16"}
    assert passes["precision"]["ratio"] > 1000
    assert "times the baseline's" in answer.reason


def test_without_a_float32_path_it_is_the_same_within_rounding_at_best(shards, tmp_path, monkeypatch):
    def refused(config, precision):
        return "attention=flash computes in half precision." if config.choices["attention"] == "flash" else None

    monkeypatch.setattr(forge.verify.examine, "refusal", refused)
    answer = compare(tmp_path / "run", "attention=flash", common=shards, baseline="attention=eager")
    assert answer.verdict == "same within rounding" and list(answer.result["passes"]) == ["deployed"]
    assert any("No maths pass, since the candidate has no float32 path" in note for note in answer.result["notes"])


@pytest.mark.parametrize(("words", "said"), [
    (["verify.declared={loss: foo}"], "verify.declared is a table of conf/verify."),
    (["declared=los"], "declared=los matches no setting. Did you mean 'loss'?"),
    (["verify.rwos=3"], "verify.rwos is not a setting. Did you mean 'verify.rows'?"),
    (["verify=gradient"], "verify=gradient is not an option. Did you mean 'gradients'?"),
    (["verify.rows=0"], "verify.rows=0: at least 1 is wanted."),
    (["verify.rows=many"], "verify.rows='many': a whole number is wanted."),
    (["verify=converge", "verify.seeds=1"], "verify.seeds=1: at least 2 is wanted."),
    (["atention=eager"], "atention is not a setting. Did you mean 'attention'?"),
    (["attention=eagre"], "attention=eagre is not an option. Did you mean 'eager'?"),
    (["baseline=atention=eager"], "The baseline (atention=eager) cannot run:\natention is not a setting."),
    (["baseline=global_batch=7 micro_batch=2"], "The baseline (global_batch=7 micro_batch=2) cannot run:"),
    (["baseline='"], "baseline=': No closing quotation."),
    (["baseline=verify.rows=3"], "verify.rows=3 is said once, outside of baseline"),
    (["resume=runs/x"], "resume= goes on with a run"),
    (["run_dir="], "run_dir names no folder"),
    (["-m"], "-m: forge.verify takes --config-dir"),
    (["from=nowhere"], "from=nowhere"),
])
def test_a_mistake_is_one_sentence(words, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as raised:
        verify(words)
    assert said in str(raised.value)
    assert not list(tmp_path.iterdir()), "nothing is written before all is checked"


def test_json_prints_what_was_written_and_knows_no_infinity(shards, tmp_path, capsys):
    """A gradient that one side lacks is infinitely far away."""
    frozen = "optimizer.groups=[{match: head.weight, lr_scale: 1.0, weight_decay: null, frozen: true}]"
    answer = compare(tmp_path / "run", frozen, "--json", common=shards)
    printed = capsys.readouterr().out
    assert printed == (tmp_path / "run" / "result.json").read_text()
    assert json.loads(printed, parse_constant=pytest.fail) == answer.result
    assert answer.result["passes"]["maths"]["first_different"]["candidate"] == "inf"


def test_a_finished_comparison_is_not_written_over_and_a_broken_one_is_made_again(shards, tmp_path, monkeypatch):
    crash = [True]

    def interrupted(*arguments):
        if crash.pop():
            raise KeyboardInterrupt

    own = forge.verify.examine.do
    monkeypatch.setattr(forge.verify.examine, "do", lambda *arguments: interrupted() if crash else own(*arguments))
    with pytest.raises(KeyboardInterrupt):
        compare(tmp_path / "run", "overlap=prefetch", common=shards)
    partial = json.loads((tmp_path / "run" / "result.json").read_text())
    assert (partial["status"], partial["verdict"]) == ("interrupted", None)
    assert compare(tmp_path / "run", "overlap=prefetch", common=shards).verdict == "same bits"
    with pytest.raises(ConfigError, match="already holds"):
        compare(tmp_path / "run", "overlap=prefetch", common=shards)


def test_a_side_that_cannot_run_is_named(shards, tmp_path):
    unknown = "optimizer.groups=[{match: nose, lr_scale: 1.0, weight_decay: null, frozen: true}]"
    with pytest.raises(ForgeError, match=r"The candidate cannot be run: optimizer.groups\[0\].match='nose'") as raised:
        compare(tmp_path / "run", unknown, common=shards)
    assert raised.value.exit_code == 2
    assert json.loads((tmp_path / "run" / "result.json").read_text())["status"] == "failed"


def test_trainings_of_the_same_are_the_same_and_of_another_rate_are_not(shards, tmp_path):
    short = ["verify=converge", "verify.steps=12", "verify.seeds=2", "verify.smooth=4"]
    same = compare(tmp_path / "same", "overlap=prefetch", *short, common=shards)
    assert (same.code, same.verdict) == (0, "same bits")
    training = same.result["passes"]["training"]
    loss, gaps = training["metrics"]["heldout_loss"], training["largest_gaps"]
    assert loss["pairs"]["candidate"] == [0.0, 0.0] and loss["spread"] > 1e-3
    assert 0 < max(map(abs, loss["pairs"]["twin"])) < 1e-3 and 0 < gaps["twin"] < gaps["seeds"]
    assert 0 < training["metrics"]["accuracy"]["values"]["baseline"][0] < 1
    slower = compare(tmp_path / "slower", "optimizer.lr=1e-4", *short, common=shards)
    assert (slower.code, slower.verdict) == (0, "differs by design: optimizer.lr = 0.003 -> 0.0001"), slower.reason


def test_sigterm_ends_it_as_ctrl_c_does(shards, tmp_path, monkeypatch):
    monkeypatch.setattr(forge.verify.examine, "do", lambda *arguments: _terminate(15, None))
    with pytest.raises(Terminated):
        compare(tmp_path / "run", "overlap=prefetch", common=shards)
    assert json.loads((tmp_path / "run" / "result.json").read_text())["status"] == "interrupted"
    assert not (tmp_path / "run" / "scratch").exists()
    monkeypatch.setattr("forge.verify.__main__.verify", lambda words: os.kill(os.getpid(), signal.SIGTERM))
    monkeypatch.setattr("sys.argv", ["forge.verify"])
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)}
    with pytest.raises(SystemExit) as ended:
        main()
    for number, handler in before.items():
        signal.signal(number, handler)
    assert ended.value.code == 75


@pytest.mark.slow
def test_in_a_process_of_its_own_it_prints_the_verdict_and_json(shards, tmp_path):
    words = [*TINY, *shards, "checkpointing=full", f"baseline={' '.join([*TINY, *shards])}"]
    done = run_command("verify", *words, f"run_dir={tmp_path}/a")
    assert done.returncode == 0, done.stderr
    assert "VERDICT  same bits" in done.stdout and "checkpointing = none -> full" in done.stdout
    done = run_command("verify", *words, "--json", f"run_dir={tmp_path}/b")
    assert json.loads(done.stdout)["verdict"] == "same bits"
    assert "Exit codes" in run_command("verify", "--help").stdout
