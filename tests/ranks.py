"""Ranks as processes of this machine, forked off a server that has imported torch and forge once."""

import multiprocessing
import os
import pickle
import sys
import tempfile
from datetime import timedelta
from functools import cache
from multiprocessing import forkserver
from pathlib import Path

import pytest
import torch.distributed as dist
from conftest import TINY, Finished, composed

import forge.worker
from forge.stopping import Stopping

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["ranks", "forge.build", "torch._dynamo"])
SECONDS = 60            # in which a rank that hangs is given up


def at_ranks(world: int, function, *arguments) -> list:
    """What function(*arguments) returns on each rank, in a gloo group of so many."""
    return _each(world, _in_group, function, *arguments)


def train_at_ranks(run_dir: Path, world: int, *overrides: str, resume: Path | None = None) -> Finished:
    """One run, its workers as forge.train starts them but for the interpreters."""
    from forge.config import check, realise
    from forge.freeze import freeze

    settings = composed(*TINY, *overrides, f"hardware.processes={world}", f"run_dir={run_dir}",
                        f"resume={resume or 'null'}")
    check(realise(settings))
    freeze(settings, run_dir)
    codes = _each(world, forge.worker.work, run_dir, (), Stopping())
    said = "\n".join(path.read_text() for path in run_dir.glob("failures/*.json"))
    return Finished(max(map(int, codes)), "", said, run_dir)


@cache
def _serve() -> None:
    """Start the server with this process's path, which it does not ask for before Python 3.12."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
        forkserver.ensure_running()


def _each(world: int, function, *arguments) -> list:
    _serve()
    with tempfile.TemporaryDirectory() as meeting:
        ends = [CONTEXT.Pipe(duplex=False) for _ in range(world)]
        workers = [CONTEXT.Process(target=_start, args=(rank, world, f"{meeting}/store", end, function, arguments))
                   for rank, (_, end) in enumerate(ends)]
        try:
            for worker in workers:
                worker.start()
            results = []
            for rank, (end, _) in enumerate(ends):
                assert end.poll(SECONDS), f"rank {rank} hangs"
                results.append(pickle.loads(end.recv_bytes()))
        finally:
            for worker in workers:
                worker.kill()
                worker.join()
    for result in results:
        if isinstance(result, Exception):
            raise result
    return results


def _start(rank, world, meeting, end, function, arguments):
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world),
                   "LOCAL_WORLD_SIZE": str(world), "FORGE_MEETING": meeting, "FORGE_PARENT": str(os.getppid())}
    try:
        result = function(*arguments)
    except Exception as error:
        result = error
    end.send_bytes(pickle.dumps(result))


def _in_group(function, *arguments):
    dist.init_process_group("gloo", init_method=f"file://{os.environ['FORGE_MEETING']}", rank=int(os.environ["RANK"]),
                            world_size=int(os.environ["WORLD_SIZE"]), timeout=timedelta(seconds=SECONDS))
    result = function(*arguments)
    dist.barrier()
    dist.destroy_process_group()
    return result
