"""Options that live outside the repository: two new files and no edit, for the command and for its workers."""

import json
import sys

import pytest
from conftest import TINY, forge, train_here
from planted import plant, train_planted

from forge.errors import ConfigError
from forge.sample import sample
from forge.train import train

ATTENTION = """
from dataclasses import dataclass
from forge.attention.eager import Eager

@dataclass(frozen=True)
class Option(Eager):
    '''Eager attention over scores that are sharper.'''

    sharpness: float

    def problems(self, config):
        if self.sharpness <= 0:
            yield f"attention.sharpness={self.sharpness}: more than 0 is wanted."

    def __call__(self, q, k, v, plan, dropout):
        return super().__call__(q * self.sharpness, k, v, plan, dropout)
"""
OVERLAP = """
from dataclasses import dataclass, replace

@dataclass(frozen=True)
class Option:
    '''Every batch of an update is staged before the first is handed out.'''

    def __call__(self, works, stage, mark):
        for work in works:
            mark("copy")
            yield replace(work, batches=[stage(batch) for batch in work.batches])
"""
SCHEDULE = """
from dataclasses import dataclass

@dataclass(frozen=True)
class Option:
    falls: float
    warmup: int

    def __call__(self, step, steps):
        return self.falls ** max(0, step - self.warmup)
"""


@pytest.fixture(scope="module")
def outside(tmp_path_factory):
    folder = tmp_path_factory.mktemp("outside")
    plant(folder, "attention", "sharper", ATTENTION, sharpness=1.0)
    plant(folder, "overlap", "early", OVERLAP)
    plant(folder, "schedule", "falling", SCHEDULE, falls=0.5, warmup=0)
    return folder


@pytest.fixture(scope="module")
def plain(shards, tmp_path_factory):
    return train_here(tmp_path_factory.mktemp("plain") / "run", *shards, "attention=eager", "model.dropout=0.1")


@pytest.mark.dist
@pytest.mark.slow
def test_attention_from_a_folder_trains_is_sampled_and_is_trained_again(outside, plain, shards, tmp_path, monkeypatch,
                                                                        capsys):
    """Through all that have to know of it: the command, its worker, sampling, a second run from the first."""
    run, again = tmp_path / "run", tmp_path / "again"
    folder, permission = f"--config-dir={outside}/conf", "allowed_packages=planted_sharper"
    env = {"PYTHONPATH": str(outside)}
    done = forge("train", folder, permission, "attention=sharper", *TINY, *shards, "model.dropout=0.1",
                 "snapshot=inline", f"run_dir={run}", env=env)
    assert done.returncode == 0, done.stderr
    losses = [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert losses == list(plain.losses.values()), "with a sharpness of 1 it is eager attention"
    assert "| attention | sharper |" in (run / "report.md").read_text()

    done = forge("train", folder, permission, f"from={run}", "attention.sharpness=3.0", "steps=2", f"run_dir={again}",
                 env=env)
    assert done.returncode == 0, done.stderr
    assert json.loads((again / "result.json").read_text())["loss_last"] != losses[1]

    monkeypatch.syspath_prepend(outside)
    monkeypatch.setattr(sys, "argv", ["forge.train"])
    assert sample([f"from={run}", permission, "length=5"]) == 0
    assert capsys.readouterr().out.startswith("def ")
    for refused, words in ((sample, [f"from={run}"]), (train, [folder, f"resume={run}", "steps=8"])):
        with pytest.raises(ConfigError, match=r"lies outside .* allowed_packages=planted_sharper"):
            refused(words)


def test_without_permission_nothing_of_it_is_imported(outside, tmp_path):
    (tmp_path / "conf" / "attention").mkdir(parents=True)
    (tmp_path / "conf" / "attention" / "evil.yaml").write_text("_target_: planted_evil.Option\n")
    (tmp_path / "planted_evil.py").write_text("open('executed', 'w')\n")
    for permission in ([], ["allowed_packages=planted_sharper"]):
        done = forge("train", "--config-dir", str(tmp_path / "conf"), *permission, "attention=evil", cwd=tmp_path,
                     env={"PYTHONPATH": f"{tmp_path}:{outside}:."})
        assert done.returncode == 2
        assert "planted_evil.Option lies outside" in done.stderr and "allowed_packages=planted_evil" in done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["conf", "planted_evil.py"]


def test_an_overlap_from_a_folder_changes_no_bit(outside, plain, shards, tmp_path):
    run = train_planted(tmp_path / "run", outside, "planted_early", *shards, "attention=eager", "model.dropout=0.1",
                        "overlap=early")
    assert run.code == 0, run.err
    assert run.losses == plain.losses


def test_a_schedule_from_a_folder_decides_the_rate(outside, shards, tmp_path):
    run = train_planted(tmp_path / "run", outside, "planted_falling", *shards, "schedule=falling",
                        "optimizer.lr=0.01")
    assert run.code == 0, run.err
    wanted = [0.01, 0.01, 0.01, 0.005, 0.0025, 0.00125]     # two updates of warm-up, by conftest's words
    assert [record["lr"] for record in run.records] == pytest.approx(wanted)


def test_its_own_problems_and_schema_are_those_of_an_option(outside, shards, tmp_path):
    for words, said in ((["attention.sharpness=-1"], "attention.sharpness=-1.0: more than 0 is wanted."),
                        (["attention.sharpness=much"], "attention.sharpness='much': a number is wanted."),
                        (["+attention.sharpnes=1"], "attention.sharpnes is not a setting. Did you mean 'sharpness'?")):
        with pytest.raises(Exception) as raised:
            train_planted(tmp_path / "run", outside, "planted_sharper", *shards, "attention=sharper", *words)
        assert said in str(raised.value)
    assert not (tmp_path / "run").exists()
