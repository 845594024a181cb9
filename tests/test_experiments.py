"""Experiments change what they say and nothing else, and each of them trains."""

import re
import sys
from pathlib import Path

import pytest
import torch
from conftest import Finished, composed, forge
from omegaconf import OmegaConf

from forge.config import check, conf_dir, realise
from forge.model import Parts

FOLDER = Path(conf_dir()) / "experiment"

# What each step may change against the one before: setting -> (before, after).
CHANGES = {
    1: {"attention._target_": ("forge.attention.eager_stored.EagerStored", "forge.attention.eager.Eager")},
    2: {"precision._target_": ("forge.precision.fp32.FP32", "forge.precision.tf32.TF32")},
    3: {"optimizer.implementation": ("foreach", "fused")},
    4: {"dataloader.pin_memory": (False, True)},
    5: {"precision._target_": ("forge.precision.tf32.TF32", "forge.precision.bf16_pure.BF16Pure"),
        "precision.reduce": (None, "bfloat16"), "precision.float32_products": (None, "float32")},
    6: {"operators._target_": ("forge.operators.handwritten.Handwritten", "forge.operators.native.Native")},
    7: {"attention._target_": ("forge.attention.eager.Eager", "forge.attention.sdpa.SDPA"),
        "model.fused_qkv": (False, True)},
    8: {"compile._target_": ("forge.compile.none.NotCompiled", "forge.compile.whole.Whole"),
        "compile.dynamic": (None, False), "compile.fullgraph": (None, False)},
    9: {"model.vocab_size": (50257, 50304), "global_batch": (8, 32)},
    10: {"model.dropout": (0.1, 0.0)},
    11: {"model.tied": (False, True)},
    12: {"attention._target_": ("forge.attention.sdpa.SDPA", "forge.attention.cudnn.CuDNN")},
    13: {"precision._target_": ("forge.precision.bf16_pure.BF16Pure", "forge.precision.bf16.BF16"),
         "precision.scope": (None, "model"), "precision.cache_enabled": (None, True),
         "precision.reduce": ("bfloat16", "float32"), "precision.residual": (None, "bfloat16")},
    14: {"global_batch": (32, 64)},
    15: {"loss._target_": ("forge.loss.plain.Plain", "forge.loss.inplace.Inplace")},
    16: {"operators._target_": ("forge.operators.native.Native", "forge.operators.fused.Fused")},
    17: {"optimizer.implementation": ("fused", "triton")},
    18: {"model.biases": (True, False)},
}
STEPS = range(len(CHANGES) + 1)
SMALL = ["hardware=cpu", "model.width=32", "model.layers=2", "model.heads=2", "model.head_width=16", "model.hidden=48",
         "model.vocab_size=256", "sequence_length=32", "model.max_length=32", "global_batch=4", "steps=2", "tracker=[]",
         "tracker.every=1", "dataloader.workers=0"]


def settings(*overrides: str) -> dict:
    """Dotted setting -> value of a whole run, as Hydra composes it."""
    found = {}

    def visit(node, path):
        for key, value in node.items():
            if isinstance(value, dict) and value:
                visit(value, f"{path}{key}.")
            elif path + key not in ("run_dir", "choices"):
                found[path + key] = value

    visit(OmegaConf.to_container(composed(*overrides), resolve=True), "")
    return found


@pytest.mark.parametrize("step", CHANGES)
def test_a_step_changes_what_its_name_says_and_nothing_else(step):
    before, after = settings(f"experiment=nine_steps/step_{step - 1}"), settings(f"experiment=nine_steps/step_{step}")
    changed = {key: (before.get(key), after.get(key)) for key in before.keys() | after.keys()
               if before.get(key) != after.get(key)}
    assert changed == CHANGES[step]


def test_every_step_is_compared():
    assert {f"step_{step}" for step in STEPS} == {file.stem for file in FOLDER.glob("nine_steps/*.yaml")}


def test_the_first_step_is_what_was_published():
    first = settings("experiment=nine_steps/step_0")
    published = {
        "model.width": 768, "model.layers": 12, "model.heads": 12, "model.hidden": 3072, "model.max_length": 1024,
        "model.vocab_size": 50257, "model.dropout": 0.1, "model.tied": False, "model.activation": "gelu_tanh",
        "global_batch": 8, "sequence_length": 1024, "optimizer.lr": 5e-4, "optimizer.weight_decay": 0.1,
        "optimizer.beta1": 0.9, "optimizer.beta2": 0.999, "optimizer.eps": 1e-8, "optimizer.clip": None,
        "schedule._target_": "forge.schedule.constant.Constant", "schedule.warmup": 0, "dataloader.workers": 4}
    assert {key: first[key] for key in published} == published
    assert all(realise(composed("experiment=nine_steps/step_0")).schedule(step, 100) == 1 for step in (0, 1, 99))


def test_the_steps_have_the_published_number_of_weights_and_27648_biases_more():
    def weights(step):
        config = realise(composed(f"experiment=nine_steps/step_{step}"))
        with torch.device("meta"):
            network = config.model.build(Parts(config.attention, config.operators, config.moe_router, config.loss))
        return sum(parameter.numel() for parameter in network.parameters())

    assert weights(0) == weights(7) == 163_009_536 + 12 * 3 * 768
    assert weights(9) == weights(0) + 2 * (50304 - 50257) * 768
    assert weights(11) == weights(9) - 50304 * 768


@pytest.mark.parametrize("file", sorted(FOLDER.rglob("*.yaml")), ids=lambda file: file.stem)
def test_an_experiment_says_what_it_is(file):
    package, comment = file.read_text().splitlines()[:2]
    assert package == "# @package _global_" and len(comment) > 20
    step = re.fullmatch(r"step_(\d+)", file.stem)
    if step:
        assert comment.startswith(f"# Step {step[1]}")
        assert ("A100: " in comment) == (file.parent.name == "nine_steps" and int(step[1]) <= 9)


@pytest.fixture(scope="module")
def trained(shards, tmp_path_factory):
    """Step -> the step's run of two updates, tiny and on a CPU, with compiled code traced but not generated."""
    compile_, runs = torch.compile, {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CXX", sys.executable)         # no compiler is called
        patch.setattr(torch, "compile", lambda model, dynamic, fullgraph, mode: compile_(
            model, backend="eager", dynamic=dynamic, fullgraph=fullgraph))
        for step in STEPS:
            runs[step] = train(tmp_path_factory.mktemp("step") / "run", f"experiment=nine_steps/step_{step}",
                               *SMALL, *shards)
    return runs


def train(run_dir, *overrides) -> Finished:
    from forge.freeze import freeze
    from forge.stopping import Stopping
    from forge.worker import work

    run = composed(*overrides, f"run_dir={run_dir}")
    check(realise(run))
    freeze(run, run_dir)
    return Finished(int(work(run_dir, (), Stopping())), "", "", run_dir)


@pytest.mark.parametrize("step", STEPS)
def test_a_step_trains(step, trained):
    assert trained[step].code == 0 and trained[step].result["status"] == "finished"
    assert set(trained[step].losses) == {1, 2}
    assert all(abs(loss - torch.tensor(256.0).log()) < 0.5 for loss in trained[step].losses.values())


@pytest.mark.parametrize(("one", "other"), [(0, 1), (1, 2), (3, 4)])
def test_mask_tf32_on_a_cpu_and_pinned_memory_change_no_bit(one, other, trained):
    assert trained[one].losses == trained[other].losses


def test_the_fused_update_agrees_within_rounding(trained):
    """The loss after one update by 5e-4: a sum of 128 float32 losses whose weights differ in the last place."""
    assert trained[2].losses[2] == pytest.approx(trained[3].losses[2], rel=1e-6)
    assert trained[2].losses[2] != trained[2].losses[1]


def test_an_experiment_yields_to_the_command_line_and_not_to_the_defaults():
    assert settings("experiment=nine_steps/step_9")["global_batch"] == 32
    assert settings("experiment=nine_steps/step_9", "global_batch=16")["global_batch"] == 16
    assert settings("global_batch=16", "experiment=nine_steps/step_9")["global_batch"] == 16
    assert settings("experiment=nine_steps/step_9", "attention=flash")["attention._target_"].endswith("Flash")


def test_the_fast_line_is_the_plain_one_by_other_options():
    plain, fast = settings("experiment=gpt2_124m_plain"), settings("experiment=gpt2_124m_fast")
    assert {key for key in plain.keys() | fast.keys() if plain.get(key) != fast.get(key)} == {
        "attention._target_", "precision.residual", "loss._target_", "operators._target_", "optimizer.implementation",
        "overlap._target_", "overlap.depth"}


@pytest.mark.parametrize(("words", "said"), [
    (["experiment=nine_steps/step_33"], "Did you mean 'nine_steps/step_3'? Options: gpt2_124m_fast, gpt2_124m_plain, "
                                        "gpt2_1558m_fast, llama_1b_fast, nine_steps/step_0, nine_steps/step_1, "),
    (["experiment=gpt2_124m_fst"], "experiment=gpt2_124m_fst is not an option. Did you mean 'gpt2_124m_fast'?"),
    (["experiment="], "experiment= is not an option."),
    (["experiment=[gpt2_124m_fast]"], "a group takes one option"),
    (["+experiment=gpt2_124m_fast"], "write it without the plus, experiment=gpt2_124m_fast")])
def test_a_wrong_experiment_is_refused_in_a_sentence(words, said):
    done = forge("train", *words)
    assert (done.returncode, said in done.stderr, len(done.stderr.splitlines())) == (2, True, 1), done.stderr


def test_help_lists_the_experiments():
    told = forge("train", "--help").stdout
    assert "experiment=NAME" in told and "experiment: gpt2_124m_fast, gpt2_124m_plain" in told
    assert re.search(r"experiment/nine_steps: step_0, step_1,.* step_9", told)


def test_a_run_of_an_experiment_is_run_again_and_resumed(shards, tmp_path):
    first = tmp_path / "first"
    words = ["experiment=nine_steps/step_3", *SMALL, *shards, "snapshot=inline"]
    done = forge("train", *words, f"run_dir={first}")
    assert done.returncode == 0, done.stderr
    again = forge("train", f"from={first}", f"run_dir={tmp_path / 'again'}", "attention=sdpa")
    assert again.returncode == 0, again.stderr
    chosen = {"experiment": "nine_steps/step_3", "precision": "tf32", "model": "gpt2_124m", "attention": "sdpa"}
    run = Finished(0, "", "", tmp_path / "again")
    assert run.result["choices"].items() >= chosen.items()
    assert run.losses == pytest.approx(Finished(0, "", "", first).losses, rel=0.01)     # dropout draws differ
    more = forge("train", f"resume={first}", "steps=3")
    assert more.returncode == 0, more.stderr
    assert Finished(0, "", "", first).result["steps"] == 3
    refused = forge("train", f"from={first}", "experiment=gpt2_124m_fast")
    assert refused.returncode == 2 and "give one of them" in refused.stderr
