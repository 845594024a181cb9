"""What a user gets wrong ends with a sentence that names the setting, its value and the mend: no traceback, the right
exit code, and nothing half written. Signals and killed workers are in test_launch, damaged snapshots in test_resume."""

import errno
import os
import pickle
import shutil
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml
from conftest import TINY, Finished, forge, train_here
from planted import plant, train_planted

from forge.errors import Exit
from forge.train import main


@pytest.fixture
def typed(monkeypatch, tmp_path, capfd):
    """python -m forge.train WORDS in this process and in an empty folder: (exit code, what was said)."""
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")         # the command sets it: restored afterwards
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")

    def train(*words: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["forge.train", *words])
        with pytest.raises(SystemExit) as ended:
            main()
        said = "".join(capfd.readouterr())
        assert "Traceback" not in said
        assert not list(Path().iterdir()), "nothing was written"
        return ended.value.code, said

    return train


@pytest.fixture(scope="module")
def run_dir(shards, tmp_path_factory) -> Path:
    """A run of four updates with two snapshots. Tests take a copy."""
    done = train_here(tmp_path_factory.mktemp("bad") / "run", *shards, "snapshot=inline", "snapshot.every=2", "steps=4")
    assert done.code == 0, done.err
    return done.run_dir


@pytest.fixture
def run(run_dir, tmp_path) -> Path:
    return Path(shutil.copytree(run_dir, tmp_path / "run"))


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


# ---- the command line

LINES = [
    (["attention=flesh"], ["attention", "flesh", "cudnn", "flash"]),
    (["atention=flash"], ["atention is not a setting. Did you mean 'attention'?"]),
    (["optimizer.lrr=1"], ["optimizer.lrr is not a setting. Did you mean 'optimizer.lr'?"]),
    (["+optimizer.lrr=1"], ["optimizer.lrr is not a setting. Did you mean 'lr'?"]),
    (["stepz=3"], ["stepz is not a setting. Did you mean 'steps'?"]),
    (["+stepz=3"], ["stepz is not a setting. Did you mean 'steps'?"]),
    (["steps=many"], ["steps='many': a whole number is wanted."]),
    (["steps=1.5"], ["steps=1.5: a whole number is wanted."]),
    (["steps="], ["steps='': a whole number is wanted."]),
    (["steps"], ["'steps': SETTING=VALUE or GROUP=OPTION is wanted."]),
    (["steps=[1"], ["[1"]),
    (["optimizer.lr=fast"], ["optimizer.lr='fast': a number is wanted."]),
    (["reproducible=perhaps"], ["reproducible='perhaps': true or false is wanted."]),
    (["model.routing=5"], ["model.routing=5 does not fit"]),
    (["optimizer=null"], ["optimizer=null: the name of an option is wanted"]),
    (["experiment=null"], ["experiment=null: the name of an option is wanted", "leave the word out"]),
    (["steps=${nothing}"], ["steps", "'nothing' not found"]),
    (["steps=${oc.env:FORGE_NOT_SET}"], ["steps", "FORGE_NOT_SET"]),
    (["model=llama_1b", "model.rotary.scaling={factor: 2, beta_fast: 32}"],
     ["model.rotary.scaling: the value names settings", "write '~model.rotary.scaling' and '+model.rotary.scaling"]),
    (["optimizer.beta1=1.5"], ["optimizer.beta1=1.5: at least 0 and less than 1 is wanted."]),
    (["attention=flash", "hardware=gpu"], ["attention=flash", "add precision=bf16"]),
    (["comm.static_graph=true", "micro_batch=2"], ["comm.static_graph=true", "set comm.static_graph=false"]),
    (["global_batch=10", "micro_batch=4"], ["global_batch=10 does not divide into micro_batch=4", "a multiple of 4"]),
    (["hardware.processes=3"], ["global_batch=8 does not divide into 3 ranks", "a multiple of 3"]),
    (["model=gpt2_124m", "sequence_length=2000"], ["sequence_length=2000", "model.max_length=1024", "shorten"]),
    (["data=shards"], ["data.train names no shards", "forge.shards make"]),
    (["data=shards", "data.train=/nowhere"], ["data.train=/nowhere does not exist", "forge.shards make"]),
    (["data=shards", "data.train=."], ["data.train=. holds no .tar files", "forge.shards make"]),
    (["model.weights=/nowhere"], ["model.weights=/nowhere", "config.json"]),
    (["from=/nowhere"], ["from=/nowhere is neither a run directory"]),
    (["resume=/nowhere"], ["resume=/nowhere is neither a run directory"]),
    (["resume="], ["resume="]),
    (["from=a", "resume=b"], ["from=", "resume=", "give one of them"]),
    (["run_dir="], ["run_dir names no folder"]),
    (["--config-dir", "/nowhere"], ["'/nowhere' not found"]),
    (["attention._target_=os.system"], ["attention._target_=os.system lies outside", "allowed_packages="]),
    (["attention._target_=antigravity.Attention"], ["antigravity.Attention lies outside", "allowed_packages="]),
]


@pytest.mark.parametrize(("words", "said"), LINES, ids=[" ".join(words) for words, _ in LINES])
def test_a_mistake_on_the_command_line_is_one_sentence(words, said, typed):
    code, sentence = typed(*words)
    assert code == Exit.USAGE
    assert sentence.startswith("forge: ") and len(sentence.splitlines()) == 1
    assert all(part in sentence for part in said), sentence
    assert "antigravity" not in sys.modules


@pytest.mark.parametrize(("file", "text", "words", "said"), [
    ("optimizer/mine", "defaults: [adamw, _self_]\nweight_decai: 0.2\n", "optimizer=mine",
     "optimizer.weight_decai is not a setting. Did you mean 'weight_decay'?"),
    ("optimizer/mine", "defaults: [adamw, _self_]\nlr: quick\n", "optimizer=mine", "optimizer.lr='quick'"),
    ("optimizer/mine", "defaults: [admw, _self_]\n", "optimizer=mine", "optimizer/admw"),
    ("optimizer/mine", "lr: [1, 2\n", "optimizer=mine", "mine.yaml"),
    ("optimizer/mine", "lr: 1.0\n", "optimizer=mine", "optimizer names no option: it has no _target_."),
    ("loss/mine", "_target_: forge.loss.chunked.Chunked\npad_to: 1\n", "loss=mine", "loss.chunk_tokens is not set"),
    ("experiment/mine", "# @package _global_\noptimizer: {lrr: 1}\n", "experiment=mine",
     "optimizer.lrr is not a setting"),
    ("experiment/mine", "# @package _global_\ndefaults: [{override /attention: flesh}]\n", "experiment=mine", "flesh"),
], ids=["key", "type", "base", "syntax", "no target", "missing key", "key in experiment", "option in experiment"])
def test_a_mistake_in_a_file_is_one_sentence(file, text, words, said, typed, tmp_path):
    path = (tmp_path / "conf" / file).with_suffix(".yaml")
    path.parent.mkdir(parents=True)
    path.write_text(text)
    code, sentence = typed("--config-dir", str(tmp_path / "conf"), words)
    assert code == Exit.USAGE
    assert sentence.startswith("forge: ") and len(sentence.splitlines()) == 1 and said in sentence, sentence


def test_all_mistakes_are_said_at_once_and_nothing_is_written(typed):
    code, said = typed("steps=many", "seed=x", "optimizer.lr=fast")
    assert code == Exit.USAGE
    assert all(name in said for name in ("steps='many'", "seed='x'", "optimizer.lr='fast'"))


def test_the_command_itself_says_the_same(tmp_path):
    """Everything above ran inside this process; once as a user starts it."""
    done = forge("train", "stepz=3", cwd=tmp_path, env={"PYTHONPATH": str(Path(__file__).parents[1])})
    assert done.returncode == Exit.USAGE and done.stdout == ""
    assert done.stderr.startswith("forge: stepz is not a setting. Did you mean 'steps'?")
    assert not list(tmp_path.iterdir())


# ---- runs to go on with

def test_a_run_directory_is_not_trained_into_twice(run, shards, typed):
    before = contents(run)
    code, said = typed(*TINY, *shards, f"run_dir={run}")
    assert code == Exit.USAGE and f"run_dir={run} already holds a run" in said and "resume=" in said
    assert contents(run) == before


def test_a_run_without_a_whole_snapshot_cannot_be_resumed(run, typed):
    for manifest in run.glob("snapshots/*/manifest.json"):
        manifest.unlink()
    before = contents(run)
    code, said = typed(f"resume={run}")
    assert code == Exit.USAGE and "no whole snapshot" in said and f"from={run}" in said
    assert contents(run) == before


@pytest.mark.parametrize(("text", "said"), [
    ("\0\1\2", "config.yaml cannot be read"), ("[1, 2", "config.yaml cannot be read"), ("- 1\n", "holds no settings"),
    ("", "not set")], ids=["binary", "syntax", "list", "empty"])
@pytest.mark.parametrize("word", ["from", "resume"])
def test_a_config_that_cannot_be_read_is_named(word, text, said, run, typed):
    (run / "config.yaml").write_text(text)
    before = contents(run)
    code, sentence = typed(f"{word}={run}")
    assert code == Exit.USAGE and said in sentence
    assert contents(run) == before


def test_ranks_that_do_not_share_the_batch_cannot_resume(run, typed):
    before = contents(run)
    code, said = typed(f"resume={run}", "hardware.processes=5", "steps=6")
    assert code == Exit.USAGE and "global_batch=12 does not divide into micro_batch=4 on 5 ranks" in said
    assert contents(run) == before


# ---- code that nobody allowed

EVIL = "from pathlib import Path\nPath(__file__).with_name('executed').touch()\n"


@pytest.mark.parametrize("word", ["from", "resume"])
def test_a_class_path_in_a_loaded_config_is_not_imported(word, run, typed, tmp_path, monkeypatch):
    """Neither what the file names, nor a permission that it gives itself."""
    (tmp_path / "evil.py").write_text(EVIL)
    monkeypatch.syspath_prepend(tmp_path)
    settings = yaml.safe_load((run / "config.yaml").read_text())
    settings["loss"]["_target_"] = "evil.Loss"
    for permission in ({}, {"allowed_packages": ["evil"]}):
        (run / "config.yaml").write_text(yaml.safe_dump(settings | permission))
        code, said = typed(f"{word}={run}", "steps=6")
        assert code == Exit.USAGE and "loss._target_=evil.Loss lies outside" in said, said
    from forge.evaluate import evaluate
    from forge.sample import sample

    for command in (evaluate, sample):
        with pytest.raises(Exception, match="lies outside"):
            command([f"from={run}"])
    done = subprocess.run([sys.executable, "-m", "forge.worker", str(run)], capture_output=True, text=True,
                          env=os.environ | {"PYTHONPATH": str(tmp_path)})
    assert done.returncode == Exit.USAGE and "lies outside" in done.stderr and "Traceback" not in done.stderr
    assert not (tmp_path / "executed").exists()


class Evil:
    """A pickle that makes a file where it is loaded."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self):
        return Path.touch, (self.file,)


def test_a_pickle_in_place_of_a_snapshot_s_weights_is_never_executed(run, tmp_path):
    """With the checksum that fits it, so that only the reading itself can refuse it."""
    import hashlib
    import json

    snapshot = run / "snapshots" / "step_00000004"
    data = pickle.dumps(Evil(tmp_path / "executed"))
    for name in ("model", "update", "rng_00000"):
        shutil.copytree(snapshot, tmp_path / name)
        (tmp_path / name / f"{name}.safetensors").write_bytes(data)
        manifest = json.loads((snapshot / "manifest.json").read_text())
        manifest["files"][f"{name}.safetensors"] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        (tmp_path / name / "manifest.json").write_text(json.dumps(manifest))
        done = resumed(run, tmp_path / name)
        assert done.code == Exit.CANNOT_JUDGE and f"{name}.safetensors is not a whole safetensors file" in done.err
    assert not (tmp_path / "executed").exists()
    pickle.loads(data)
    assert (tmp_path / "executed").exists(), "the pickle would have bitten"


def resumed(run: Path, snapshot: Path) -> Finished:
    """Go on in this process from a snapshot that the launcher would not have chosen."""
    from omegaconf import OmegaConf

    from forge.stopping import Stopping
    from forge.worker import work

    settings = OmegaConf.load(run / "config.yaml")
    settings.resume, settings.steps = str(snapshot), 6
    OmegaConf.save(settings, run / "config.yaml")
    code = work(run, (), Stopping())
    return Finished(int(code), "", (run / "failures/rank_0.json").read_text(), run)


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_a_pickle_in_place_of_released_weights_is_never_executed(name, shards, run, tmp_path):
    from forge.convert import convert

    convert([f"from={run}", f"to={tmp_path}/folder"])
    (tmp_path / "folder" / "model.safetensors").unlink()
    (tmp_path / "folder" / name).write_bytes(pickle.dumps(Evil(tmp_path / "executed")))
    done = train_here(tmp_path / "new", *shards, f"model.weights={tmp_path}/folder")
    assert done.code == Exit.CANNOT_JUDGE
    assert "not a safetensors file" in done.err if name == "model.safetensors" else "is a pickle" in done.err
    assert not (tmp_path / "executed").exists()


# ---- disks

@contextmanager
def small_disk(folder: Path, size: str):
    """A folder on a disk of its own, of that size."""
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder], capture_output=True).returncode:
        pytest.skip("mounting needs root")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)        # the run's log is still open


def test_a_full_disk_is_told_before_a_run_begins(typed, tmp_path):
    with small_disk(tmp_path / "disk", "4k") as disk:
        (disk / "full").write_bytes(b"x" * 4096)
        code, said = typed(*TINY, f"run_dir={disk}/run")
        assert code == Exit.ENVIRONMENT and f"run_dir={disk}/run cannot be written: No space left on device." in said


def test_a_disk_that_fills_up_ends_the_run_and_keeps_the_older_snapshot(shards, tmp_path):
    """Room for the snapshot of update 2 (0.5 MB) and not for that of update 4."""
    with small_disk(tmp_path / "disk", "900k") as disk:
        done = train_here(disk / "run", *shards, "snapshot=inline", "snapshot.every=2")
        assert_disk_was_full(done)


@pytest.mark.parametrize("way", ["too little free", "writing fails"])
def test_no_space_ends_the_run_and_keeps_the_older_snapshot(way, shards, tmp_path, monkeypatch):
    from forge.snapshot import store

    written, write_tensors, disk_usage = [], store.write_tensors, shutil.disk_usage

    def fails_the_second_time(file, *rest):
        written.append(file)
        if len({path.parent for path in written}) == 2 and len(written) % 2 == 0:
            Path(file).write_bytes(b"half")
            raise OSError(errno.ENOSPC, "No space left on device")
        write_tensors(file, *rest)

    def full_the_second_time(path):
        return disk_usage(path)._replace(free=100) if "step_00000004" in str(path) else disk_usage(path)

    if way == "writing fails":
        monkeypatch.setattr(store, "write_tensors", fails_the_second_time)
    else:
        monkeypatch.setattr(shutil, "disk_usage", full_the_second_time)
    assert_disk_was_full(train_here(tmp_path / "run", *shards, "snapshot=inline", "snapshot.every=2"))


def assert_disk_was_full(done: Finished) -> None:
    from forge.snapshot.folder import read_manifest
    from forge.snapshot.store import verify

    assert done.code == Exit.ENVIRONMENT, done.err
    assert "No snapshot could be written in" in done.err and "Free some space" in done.err
    assert [path.name for path in (done.run_dir / "snapshots").iterdir()] == ["step_00000002"], "no half of another"
    snapshot = done.run_dir / "snapshots" / "step_00000002"
    verify(snapshot, read_manifest(snapshot))


# ---- data

def test_a_file_that_is_no_shard_is_named(tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a.tar").write_bytes(b"This is no archive." * 100)
    done = train_here(tmp_path / "run", "data=shards", f"data.train={tmp_path}/data", f"data.cache={tmp_path}/cache")
    assert done.code == Exit.CANNOT_JUDGE and f"{tmp_path}/data/a.tar, byte 0" in done.err
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_a_text_too_short_for_the_batch_says_what_would_fit(shards, tmp_path):
    done = train_here(tmp_path / "run", *shards, "sequence_length=4096")
    assert done.code == Exit.USAGE
    assert "global_batch=12 rows of sequence_length=4096" in done.err and "lower" in done.err


FRAGILE = """
import os
from dataclasses import dataclass
from torch.utils.data import get_worker_info
from forge.batching.fixed import Fixed

@dataclass(frozen=True)
class Option(Fixed):
    end: str

    def collate(self, rows, source):
        tensors = super().collate(rows, source)
        if get_worker_info() is not None and int(tensors["tokens"].sum()) % 5 == 0:
            if self.end == "exit":
                os._exit(9)
            if self.end == "kill":
                os.kill(os.getpid(), 9)
            raise LookupError("the third row is broken")
        return tensors
"""


@pytest.mark.timeout(60)
@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize(("end", "said"), [
    ("exit", "DataLoader worker (pid"), ("kill", "DataLoader worker (pid"),
    ("raise", "LookupError: the third row is broken")])
def test_a_data_worker_that_dies_ends_the_run_with_its_error(end, said, workers, shards, tmp_path):
    allowed = plant(tmp_path / "outside", "batching", "fragile", FRAGILE, sequence_length="${sequence_length}",
                    mask_documents="false", end=end)
    done = train_planted(tmp_path / "run", tmp_path / "outside", allowed, *shards, "batching=fragile", "steps=100",
                         "dataloader=webdataset", f"dataloader.workers={workers}", "snapshot=inline",
                         "snapshot.every=1")
    assert done.code == Exit.CRASHED and said in done.err and "Traceback" not in done.err, done.err
    assert not (tmp_path / "run" / "result.json").exists()
