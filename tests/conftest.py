"""What tests share: a small shard set, and runs of it in this process or in their own."""

import os

os.environ["OMP_NUM_THREADS"] = "1"        # spinning threads make small steps ten times slower

import json
import logging
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

torch.set_num_threads(1)

# What a shell starts in the background ignores these, and so would all that the tests start and send them to.
for _number, _default in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(_number) == signal.SIG_IGN:
        signal.signal(_number, _default)

TINY = ["hardware=cpu", "model.width=32", "model.layers=2", "model.heads=2", "model.kv_heads=2", "model.head_width=16",
        "model.hidden=32", "model.routing.num_experts=4", "sequence_length=32", "global_batch=12", "micro_batch=4",
        "steps=6", "evaluation=none", "tracker=[]", "tracker.every=1", "snapshot=none", "schedule.warmup=2"]


@dataclass(frozen=True)
class Finished:
    """A run that ended: its exit code, what it printed, and its files."""

    code: int
    out: str
    err: str
    run_dir: Path

    @property
    def result(self) -> dict:
        return json.loads((self.run_dir / "result.json").read_text())

    @property
    def records(self) -> list[dict]:
        return [json.loads(line) for line in (self.run_dir / "metrics.jsonl").read_text().splitlines()]

    @property
    def losses(self) -> dict[int, float]:
        return {record["step"]: record["loss"] for record in self.records if "loss" in record}


@pytest.fixture(autouse=True)
def _loggers_are_nobodys():
    """A run inside the tests' process takes the loggers for itself, as a worker does, Hydra silences them, and other
    tests listen to them."""
    logging.getLogger().setLevel(logging.WARNING)
    for logger in map(logging.getLogger, ("forge", "py.warnings")):
        logger.propagate, logger.handlers, logger.disabled = True, [], False


@pytest.fixture(scope="session")
def text_folder(tmp_path_factory) -> Path:
    """The beginnings of some files of Python source: an epoch of it is shorter than a test's run."""
    folder = tmp_path_factory.mktemp("text")
    library = Path(json.__file__).parents[1]
    for name in ("bisect", "colorsys", "keyword", "stat", "abc", "fnmatch", "glob", "copy", "queue", "sched"):
        (folder / f"{name}.py").write_text((library / f"{name}.py").read_text()[:700])
    return folder


@pytest.fixture(scope="session")
def shards(text_folder, tmp_path_factory) -> list[str]:
    """Overrides that read the files of text_folder from shards, some of them held out."""
    from forge.shards import main

    out = tmp_path_factory.mktemp("shards")
    with pytest.raises(SystemExit) as ended:
        main(["make", str(text_folder), str(out), "heldout=0.2", "pattern=*.py"])
    assert ended.value.code in (0, None)
    return ["data=shards", f"data.train={out}/train", f"data.heldout={out}/heldout"]


@pytest.fixture(scope="session")
def token_file(text_folder, tmp_path_factory) -> list[str]:
    """Overrides that read the same files as bare numbers, a byte a number, with 0 behind each file."""
    path = tmp_path_factory.mktemp("tokens") / "bytes.bin"
    path.write_bytes(b"".join(file.read_bytes() + b"\0" for file in sorted(text_folder.iterdir())))
    return ["data=tokens", f"data.train={path}", "data.dtype=uint8", "data.end=0"]


def composed(*overrides: str):
    """The settings of a run, as Hydra composes them."""
    from hydra import compose, initialize_config_dir

    from forge.config import conf_dir

    with initialize_config_dir(conf_dir(), version_base="1.3"):
        return compose("train", list(overrides))


def tiny(overrides) -> list[str]:
    """TINY and these, for models with experts and without."""
    dense = any(word.startswith("model=vlm") for word in overrides)
    return [*(word for word in TINY if not (dense and word.startswith("model.routing."))), *overrides]


def train_here(run_dir: Path, *overrides: str) -> Finished:
    """One run of one process, inside this one: no start-up to pay."""
    from forge.config import check, realise
    from forge.freeze import freeze
    from forge.stopping import Stopping
    from forge.worker import work

    settings = composed(*tiny(overrides), f"run_dir={run_dir}")
    check(realise(settings))
    freeze(settings, run_dir)
    code = work(run_dir, (), Stopping())
    failures = [json.loads(path.read_text())["message"] for path in run_dir.glob("failures/*.json")]
    return Finished(int(code), "", "\n".join(failures), run_dir)


def forge(command: str, *words: str, timeout: float = 120, env: dict[str, str] | None = None,
          cwd: Path | None = None) -> subprocess.CompletedProcess:
    """python -m forge.<command> in a process of its own."""
    return subprocess.run([sys.executable, "-m", f"forge.{command}", *words], capture_output=True, text=True,
                          timeout=timeout, env={**os.environ, **(env or {})}, cwd=cwd)


def train_apart(run_dir: Path, *overrides: str, **options) -> Finished:
    """One run through the launcher, as a user starts it."""
    done = forge("train", *TINY, *overrides, f"run_dir={run_dir}", **options)
    return Finished(done.returncode, done.stdout, done.stderr, run_dir)
