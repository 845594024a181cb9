"""A worker in trouble: signals before it listens, full disks, closed terminals. It always says what happened."""

import errno
import json
import logging
import os
import pty
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from conftest import composed, train_here
from planted import plant, train_planted

from forge.batching.fixed import Fixed
from forge.config import check, realise
from forge.errors import ConfigError, Exit
from forge.failure import Failure, FirstFailure, failure_file, record_failure
from forge.hardware.machine import Machine
from forge.launch import local
from forge.process import Unbreakable
from forge.stopping import SIGNALS, Stopping, heeded

FAULTY = """
from dataclasses import dataclass

@dataclass(frozen=True)
class Option:
    def read(self, batch):
        return batch

    def __call__(self, batch):
        raise ValueError("broken on purpose")
"""


@pytest.fixture
def signals():
    """Leaves handlers and the mask as they were."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    yield
    for number, action in before.items():
        signal.signal(number, action)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)


@pytest.fixture
def launched(monkeypatch):
    """As if the launcher had started this process: it reads what is recorded."""
    monkeypatch.setenv("FORGE_PARENT", str(os.getpid()))


def written(descriptor: int) -> str:
    """What came through a pseudo-terminal whose other end is closed."""
    found = b""
    try:
        while block := os.read(descriptor, 65536):
            found += block
    except OSError:             # Linux's way to say that this was the end
        pass
    return found.decode()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 75), (signal.SIGUSR1, 75), (signal.SIGINT, 130)])
def test_a_signal_from_before_the_worker_listens_is_not_lost(signals, number, code):
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)       # as the launcher hands it down
    signal.pthread_kill(threading.get_ident(), number)      # to this thread: another would die of it
    stopping = Stopping.listening()
    assert stopping.received == number and stopping.exit_code == code
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, ()) & set(SIGNALS)


def test_nohup_is_respected(signals):
    assert signal.SIGHUP in heeded()
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    assert heeded() == [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1]
    Stopping.listening()
    assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN


@pytest.mark.parametrize(("overrides", "words"), [
    (["launch=torchrun", "launch.nodes=0"], "launch.nodes=0: at least 1 is wanted"),
    (["launch=torchrun", "launch.nodes=5", "global_batch=12"], "does not divide into 5 ranks"),
    (["hardware.timeout_seconds=0"], "hardware.timeout_seconds=0: at least 1 is wanted"),
    (["hardware.threads=0"], "hardware.threads=0: at least 1 is wanted"),
])
def test_impossible_machines_are_refused(overrides, words):
    with pytest.raises(ConfigError, match=words):
        check(realise(composed("micro_batch=null", *overrides)))


def test_the_setting_wins_over_the_environment(monkeypatch):
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    assert Machine("cpu", 1, 2, False, 1, "automatic", None).environment() == {
        "OMP_NUM_THREADS": "2", "GOMP_SPINCOUNT": "2000"}
    assert Machine("cpu", 1, None, False, 1, "automatic", None).environment()["OMP_NUM_THREADS"] == "3"
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(12))
    assert Machine("cpu", 3, None, False, 1, "automatic", None).environment()["OMP_NUM_THREADS"] == "4"


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_the_environment_and_names_the_run_directory(tmp_path, number, launched):
    assert record_failure(tmp_path, 0, OSError(number, os.strerror(number), "metrics.jsonl")) == Exit.ENVIRONMENT
    failure = Failure.read(tmp_path, 0)
    assert failure.exit_code == 5 and f"run_dir={tmp_path}" in failure.message and "metrics.jsonl" in failure.message


def test_figures_on_a_full_disk(shards, tmp_path, launched):
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    done = train_here(tmp_path, *shards)
    assert done.code == 5 and f"run_dir={tmp_path}" in done.err and "No space left" in done.err


def test_tensorboard_on_a_full_disk(shards, tmp_path, launched, monkeypatch):
    from tensorboard.summary.writer.record_writer import RecordWriter

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(RecordWriter, "write", full)
    monkeypatch.setattr("threading.excepthook", lambda _: None)     # of its thread, which this ends
    done = train_here(tmp_path, *shards, "tracker=[tensorboard]")
    assert done.code == 5 and f"run_dir={tmp_path}" in done.err


def test_a_log_on_a_full_disk_is_no_reason_to_end(shards, tmp_path, capfd):
    (tmp_path / "log.txt").symlink_to("/dev/full")
    try:
        assert train_here(tmp_path, *shards, "overlap=prefetch").code == 0
        logging.getLogger("forge").warning("lost")
    finally:
        for handler in logging.getLogger("forge").handlers[:]:
            logging.getLogger("forge").removeHandler(handler)
    assert "Traceback" not in capfd.readouterr().err


def test_a_failure_that_cannot_be_recorded_is_said_and_keeps_its_code(tmp_path, launched, capsys):
    (tmp_path / "failures").write_text("in the way of the folder\n")
    assert record_failure(tmp_path, 3, ConfigError("steps=0: no.")) == 2
    assert "forge: worker 3: steps=0: no." in capsys.readouterr().err


def test_the_first_failure_counts(tmp_path, launched):
    failure = FirstFailure(tmp_path, 0)
    with pytest.raises(KeyError), failure.recorded():
        try:
            with failure.recorded():
                raise ConfigError("the cause")
        finally:
            assert Failure.read(tmp_path, 0).message == "the cause", "recorded before anything is closed"
            {}["closing failed as well"]
    assert Failure.read(tmp_path, 0).message == "the cause" and failure.exit_code == 2


@pytest.mark.parametrize("words", ["", '{"rank": 0, "time": 1', "[]", '{"rank": 0}', "\xff",
                                   '{"time": 1, "exit_code": 99, "message": "", "lost_peer": false}'])
def test_half_written_words_are_no_words(tmp_path, words, capsys):
    path = failure_file(tmp_path, 0)
    path.parent.mkdir()
    path.write_text(words, encoding="latin-1")
    worker = subprocess.Popen([sys.executable, "-S", "-c", "raise SystemExit(5)"])
    assert local._wait([worker], tmp_path) == [0]
    assert local._report([0], [worker], tmp_path) == 5, "the code that it ended with"
    assert "ended with exit code 5" in capsys.readouterr().err


def test_a_worker_that_hangs_while_it_closes_is_ended(tmp_path, monkeypatch):
    monkeypatch.setattr(local, "GRACE_SECONDS", 0.2)
    worker = subprocess.Popen(["sleep", "60"], start_new_session=True)
    Failure(0, time.time(), 1, "recorded, and then it hung", False).write(tmp_path)
    assert local._wait([worker], tmp_path) == [0]
    assert worker.returncode == -signal.SIGKILL


@pytest.mark.parametrize("fails", [True, False])
def test_collectives_are_left_alone_after_an_error(monkeypatch, fails):
    import torch.distributed as dist

    destroyed = []
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "destroy_process_group", lambda: destroyed.append(True))
    try:
        with Machine("cpu", 1, None, False, 1, "automatic", None).claim():
            if fails:
                raise ValueError
    except ValueError:
        pass
    assert bool(destroyed) is not fails


def test_a_run_that_fails_shows_the_cursor_again(shards, tmp_path, launched, monkeypatch):
    allowed = plant(tmp_path / "outside", "augment", "faulty", FAULTY)
    ours, theirs = pty.openpty()
    with open(theirs, "w") as terminal:
        monkeypatch.setattr(sys, "stderr", terminal)
        monkeypatch.setenv("TERM", "xterm")
        done = train_planted(tmp_path / "run", tmp_path / "outside", allowed, *shards, "augment=faulty",
                             "tracker=[console]")
    seen = written(ours)
    os.close(ours)
    assert done.code == 1 and "broken on purpose" in done.err
    assert "\x1b[?25l" in seen and seen.rindex("\x1b[?25h") > seen.rindex("\x1b[?25l")


def test_a_stream_whose_reader_has_gone_is_written_to_for_nothing():
    code = ("import sys; from forge.process import outlive_terminal; outlive_terminal(); import rich.console\n"
            "for turn in range(3): rich.console.Console().print('x y ' * 9); print('z' * 100000); sys.stdout.flush()\n"
            "sys.exit(75)\n")
    reads, writes = os.pipe()
    os.close(reads)
    done = subprocess.run([sys.executable, "-c", code], stdout=writes, stderr=subprocess.PIPE, text=True, timeout=60,
                          cwd=Path(__file__).parents[1])
    os.close(writes)
    assert done.returncode == 75 and not done.stderr
    assert Unbreakable(sys.__stdout__).encoding == sys.__stdout__.encoding


@pytest.mark.dist
def test_a_closed_terminal_does_not_end_the_run(shards, tmp_path):
    """As when an SSH session breaks off and the run was told to ignore that."""
    from conftest import TINY

    ours, theirs = pty.openpty()
    run = subprocess.Popen([sys.executable, "-m", "forge.train", *TINY, *shards, "steps=200", "tracker=[console]",
                            f"run_dir={tmp_path}/run"], stdout=theirs, stderr=theirs, start_new_session=True,
                           env={**os.environ, "TERM": "xterm"})
    os.close(theirs)
    seen = b""
    while b"training" not in seen:
        seen += os.read(ours, 65536)
    os.close(ours)
    assert run.wait(60) == 0, (tmp_path / "run" / "log.txt").read_text()
    assert json.loads((tmp_path / "run" / "result.json").read_text())["status"] == "finished"


@pytest.mark.dist
def test_threads_are_set_before_torch_reads_them(shards, tmp_path):
    """Also where an option of the user's imports torch at once."""
    from conftest import TINY, forge

    counted = "import torch\n" + FAULTY.replace('"broken on purpose"', 'f"{torch.get_num_threads()} threads"')
    allowed = plant(tmp_path / "outside", "augment", "counted", counted)
    done = forge("train", f"--config-dir={tmp_path}/outside/conf", f"allowed_packages={allowed}", *TINY, *shards,
                 "augment=counted", "hardware.threads=1", f"run_dir={tmp_path}/run",
                 env={"PYTHONPATH": f"{tmp_path}/outside", "OMP_NUM_THREADS": "2", "OMP_DISPLAY_ENV": "VERBOSE"})
    assert done.returncode == 1 and "ValueError: 1 threads" in done.stderr
    shown = done.stderr.split("OPENMP DISPLAY ENVIRONMENT BEGIN")[-1]
    assert "GOMP_SPINCOUNT = '2000'" in shown, "how long threads that wait spin"


@pytest.mark.parametrize("ended", ["done", "failed"])
def test_no_thread_that_plans_is_left_by_a_run(ended, shards, tmp_path, monkeypatch):
    planned, plan = [], Fixed.plan

    def slowly(batching, source, seed, epoch, global_batch):
        planned.append((epoch, threading.current_thread().name))
        if planned[-1][1] == "planner":
            threading.Event().wait(1)               # the run ends before
        return plan(batching, source, seed, epoch, global_batch)

    monkeypatch.setattr(Fixed, "plan", slowly)
    if ended == "failed":
        monkeypatch.setattr("forge.trainer.scale_of", lambda *_: 1 / 0)
    done = train_here(tmp_path / "run", *shards, "steps=2")
    assert (done.code == 0) == (ended == "done") and (1, "planner") in planned
    assert "planner" not in [thread.name for thread in threading.enumerate()]
