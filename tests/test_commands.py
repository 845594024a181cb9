"""The commands beside train, and what a run leaves for them and for people."""

import os
import random
import re
import subprocess
import sys

import numpy as np
import pytest
import torch
from conftest import forge, train_here

from forge.convert import convert
from forge.errors import ConfigError, Exit, UnreadableError
from forge.evaluate import evaluate
from forge.restore import restored
from forge.sample import sample


@pytest.fixture(scope="module")
def run(shards, tmp_path_factory):
    """A run with everything a run can leave behind."""
    done = train_here(tmp_path_factory.mktemp("commands") / "run", *shards, "snapshot=inline", "snapshot.every=3",
                      "evaluation=heldout", "evaluation.every=2", "evaluation.batches=1000", "evaluation.sample=20",
                      "tracker=[console,tensorboard]", "tracker.every=1", "model.dropout=0.1")
    assert done.code == 0, done.err
    return done


def loss_said(capsys, *words: str) -> float:
    assert evaluate(list(words)) == Exit.ANSWERED
    said = re.fullmatch(r"(\w+) loss ([\d.]+) nats a byte over [\d,]+ bytes, of .*/step_\d{8}\n",
                        capsys.readouterr().out)
    assert said, "one line"
    return float(said[2])


# ---- what a run leaves behind

def test_result_json_holds_every_key_of_the_contract(run):
    result = run.result
    assert {"status", "steps", "tokens", "loss_first", "loss_last", "loss_heldout", "tokens_per_second", "step_ms",
            "phases_ms", "mfu", "mfu_exact", "hfu", "peak_memory_bytes", "device", "versions"} <= result.keys()
    assert set(result["step_ms"]) == {"median", "p90", "mean"}
    assert set(result["phases_ms"]) == {"data_wait", "copy", "forward", "backward", "exposed_comm", "optimizer", "idle",
                                        "other"}
    assert (result["status"], result["steps"], result["tokens"]) == ("finished", 6, 6 * 12 * 32)
    assert (result["loss_first"], result["loss_last"]) == (run.losses[1], run.losses[6])
    assert all(result[name] > 0 for name in ("tokens_per_second", "peak_memory_bytes", "loss_heldout", "loss_trigram"))


def test_what_was_not_measured_is_null_and_not_0(run):
    assert all(run.result[name] is None for name in ("mfu", "mfu_exact", "hfu"))
    assert run.result["phases_ms"]["exposed_comm"] is None and run.result["phases_ms"]["idle"] is None
    measured = [ms for ms in run.result["phases_ms"].values() if ms is not None]
    assert len(measured) >= 5 and all(ms > 0 for ms in measured)


def test_metrics_hold_a_line_a_step(run):
    steps = [record for record in run.records if "loss" in record]
    assert [record["step"] for record in steps] == [1, 2, 3, 4, 5, 6]
    assert all({"loss", "lr", "gradient_norm", "applied", "skipped", "targets", "time"} <= record.keys()
               for record in steps)
    assert [record["step"] for record in run.records if "loss_heldout" in record] == [2, 4, 6]


def test_records_are_as_rare_as_asked(shards, tmp_path):
    done = train_here(tmp_path / "run", *shards, "tracker.every=4")
    assert list(done.losses) == [1, 4, 6]


def test_a_report_and_a_snapshot_are_where_the_result_says(run):
    report = (run.run_dir / "report.md").read_text()
    assert f"{run.result['loss_heldout']:.4f}" in report and f"{run.result['loss_trigram']:.4f}" in report
    assert sorted(path.name for path in (run.run_dir / "snapshots").iterdir()) == ["step_00000003", "step_00000006"]
    assert run.result["snapshot"] == str(run.run_dir / "snapshots" / "step_00000006")


def test_tensorboard_reads_the_same_losses(run):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(run.result["tensorboard"])
    events.Reload()
    read = {event.step: event.value for event in events.Scalars("train/loss")}
    assert read == {step: pytest.approx(loss, rel=1e-7) for step, loss in run.losses.items()}     # kept as float32
    assert [event.step for event in events.Scalars("train/loss_heldout")] == [2, 4, 6]


# ---- evaluate

def test_evaluation_says_what_the_run_said(run, capsys):
    assert loss_said(capsys, f"from={run.run_dir}") == pytest.approx(run.result["loss_heldout"], abs=1e-6)


def test_an_older_snapshot_another_split_and_fewer_batches_can_be_asked_for(run, capsys):
    newest = loss_said(capsys, f"from={run.run_dir}")
    older = loss_said(capsys, f"from={run.run_dir}/snapshots/step_00000003")
    assert older > newest
    assert loss_said(capsys, f"from={run.run_dir}", "split=train") != newest
    assert loss_said(capsys, f"from={run.run_dir}", "batches=1") != newest


def test_other_parts_can_evaluate_the_same_weights(run, capsys):
    """2e-6: float32 rounding of a mean over two hundred targets, printed with six digits."""
    plain = loss_said(capsys, f"from={run.run_dir}")
    for words in (["attention=eager", "moe_router=loop"], ["operators=handwritten"], ["loss=chunked"]):
        assert loss_said(capsys, f"from={run.run_dir}", *words) == pytest.approx(plain, abs=2e-6)


@pytest.mark.parametrize("training", [True, False])
def test_evaluation_leaves_weights_mode_and_random_state_as_they_are(training, run):
    """Even where the model draws from the global generator."""
    from forge.observe.evaluate import Judge

    def state():
        return torch.get_rng_state().tolist(), np.random.get_state()[1].tolist(), random.getstate()

    with restored(run.run_dir, ["hardware=cpu"], ()) as found:
        judge = Judge.of(found.config, found.topology, "heldout")
        model, drawn = found.model.train(training), []
        weights = {name: weight.clone() for name, weight in model.state_dict().items()}
        model.register_forward_pre_hook(lambda module, inputs: drawn.append(torch.rand(1)))
        before = state()
        losses = [judge.mean_loss(model, 2) for _ in range(2)]
        assert len(drawn) == 4 and losses[0] == losses[1]
        assert state() == before and model.training is training
        assert all(torch.equal(weights[name], weight) for name, weight in model.state_dict().items())
        assert all(parameter.grad is None for parameter in model.parameters())


def test_evaluate_writes_nothing_into_the_run(run, capsys):
    before = {path: path.stat().st_mtime_ns for path in run.run_dir.rglob("*")}
    loss_said(capsys, f"from={run.run_dir}")
    assert {path: path.stat().st_mtime_ns for path in run.run_dir.rglob("*")} == before


def test_evaluation_inside_a_run_changes_no_later_loss(run, shards, tmp_path):
    plain = train_here(tmp_path / "plain", *shards, "model.dropout=0.1")
    assert run.losses == plain.losses


# ---- sample

def sampled(capsys, run, *words: str) -> str:
    assert sample([f"from={run.run_dir}", "length=30", *words]) == Exit.ANSWERED
    return capsys.readouterr().out


def test_a_sample_is_the_same_for_a_seed(run, capsys):
    texts = [sampled(capsys, run, "prompt=def ", "seed=3") for _ in range(2)]
    assert texts[0] == texts[1] and texts[0].startswith("def ") and len(texts[0]) > 10
    assert sampled(capsys, run, "prompt=def ", "seed=4") != texts[0]
    cold = [sampled(capsys, run, "prompt=def ", "temperature=0", f"seed={seed}") for seed in (3, 4)]
    assert cold[0] == cold[1]
    assert cold[0] == sampled(capsys, run, "prompt=def ", "top_k=1", "seed=9")


def test_a_prompt_may_be_longer_than_a_row(run, capsys):
    assert sampled(capsys, run, f"prompt={'x = 1  ' * 20}").startswith("x = 1  x")


# ---- convert (tests/test_convert.py has the rest)

def test_there_and_back_evaluates_to_the_same_loss(run, shards, tmp_path, capsys):
    assert convert([f"from={run.run_dir}", f"to={tmp_path}/folder"]) == Exit.ANSWERED
    assert convert([f"from={tmp_path}/folder", f"to={tmp_path}/back", *shards, "sequence_length=32", "micro_batch=4",
                    "global_batch=12", "hardware=cpu"]) == Exit.ANSWERED
    capsys.readouterr()
    assert loss_said(capsys, f"from={tmp_path}/back") == loss_said(capsys, f"from={run.run_dir}")


# ---- mistakes

@pytest.mark.parametrize(("command", "words", "said"), [
    (evaluate, [], "from= is missing"),
    (evaluate, ["split=test"], "split=test: train or heldout is wanted."),
    (evaluate, ["batches=all"], "batches=all: a whole number is wanted."),
    (evaluate, ["micro_bach=2"], "micro_bach is not a setting. Did you mean 'micro_batch'?"),
    (evaluate, ["attention=flesh"], "attention=flesh is not an option. Did you mean 'flash'?"),
    (sample, ["temperature=-1"], "temperature=-1.0: at least 0.0 is wanted."),
    (sample, ["length=0"], "length=0: at least 1 is wanted."),
    (sample, ["lenght=10"], "lenght is not a setting."),
])
def test_a_mistake_is_named(command, words, said, run):
    start = [] if said.startswith("from=") else [f"from={run.run_dir}"]
    with pytest.raises(ConfigError) as raised:
        command([*start, *words])
    assert said in str(raised.value)


@pytest.mark.parametrize("command", [evaluate, sample])
def test_a_folder_that_is_no_run_is_named(command, run, tmp_path):
    with pytest.raises(ConfigError, match="neither a run directory"):
        command([f"from={tmp_path}"])
    (tmp_path / "config.yaml").write_text((run.run_dir / "config.yaml").read_text())
    with pytest.raises(UnreadableError, match="snapshot"):
        command([f"from={tmp_path}"])


# ---- help

def test_help_lists_groups_and_options_without_importing_torch():
    code = ("import sys, runpy\nsys.argv = ['forge.train', '--help']\n"
            "try:\n    runpy.run_module('forge.train', run_name='__main__')\n"
            "except SystemExit as ended:\n    assert not ended.code, ended.code\n"
            "print('torch' in sys.modules, 'numpy' in sys.modules)")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    *text, imported = done.stdout.splitlines()
    assert imported == "False False"
    from forge.config import conf_dir

    for group in sorted(name for name in os.listdir(conf_dir()) if os.path.isdir(os.path.join(conf_dir(), name))):
        assert any(group in line for line in text), group


@pytest.mark.parametrize("command", ["evaluate", "sample", "convert"])
def test_help_of_the_other_commands_is_their_usage(command):
    done = forge(command, "--help")
    assert f"python -m forge.{command} from=" in done.stdout + done.stderr
    assert "Traceback" not in done.stderr
