"""Arms that simulate a machine: what the commands make of turns is tested without the time that turns take."""

import copy
import json
import math
import random

from forge.bench.__main__ import run
from forge.bench.resident import ArmFailed
from forge.composition import training_settings
from forge.errors import Exit, ForgeError

WORDS = ["hardware=cpu", "global_batch=8", "sequence_length=32"]
PHASES = {"data_wait": 0.1, "forward": 0.4, "backward": 0.5}


class Machine:
    """speeds: word -> factor of the length of a step. noise: of a turn. fails: word -> when it fails ("start", or the
    number of the turn of any arm), with which error."""

    def __init__(self, speeds=(), noise=0.001, fails=(), drift=0.0, between=0.0):
        self.speeds, self.noise, self.fails, self.drift, self.between = dict(speeds), noise, dict(fails), drift, between
        self.draws, self.asked, self.running, self.most_running = random.Random(0), 0, [], 0

    def arm(self, trial, patience, cold, allowed, running):
        self.running = running
        return Simulated(self, trial, running)


class Simulated:
    def __init__(self, machine, trial, running):
        self.machine, self.trial, self.name, self.running = machine, trial, trial.name, running
        running.append(self)
        machine.most_running = max(machine.most_running, len(running))
        self.scale = 20 * math.exp(machine.draws.gauss(0, machine.between))
        for word, factor in machine.speeds.items():
            self.scale *= factor if word in trial.words else 1
        self._fail("start")
        self.facts = {"startup_seconds": 1.0, "flops_per_token": 1e6, "parameters": 1000, "versions": {"cuda": None},
                      "device": {"type": "cpu", "count": 1, "name": None, "uuid": None, "peak_flops": None,
                                 "threads": 1}}

    def ask(self, do, settle=0, steps=0, telemetry=True, **rest):
        assert self in self.running, "it has ended"
        self.machine.asked += 1
        self._fail(self.machine.asked)
        machine = self.machine
        level = self.scale * (1 + machine.drift * machine.asked) * math.exp(machine.draws.gauss(0, machine.noise))
        lengths = [level * math.exp(machine.draws.gauss(0, 0.001)) for _ in range(steps)]
        rows = self.trial.config.global_batch
        return {"lengths": lengths, "settling": [level] * settle, "tokens": 32.0 * rows * steps, "wall_seconds": 1.0,
                "phases": {name: share * sum(lengths) for name, share in PHASES.items()},
                "peak_memory": 10**9, "disturbances": []}

    def end(self):
        if self in self.running:
            self.running.remove(self)

    def _fail(self, when):
        for word, (at, error) in self.machine.fails.items():
            if at == when and (word in self.trial.words or word == "any"):
                self.end()
                raise ArmFailed(error, Exit.CRASHED, self.name) if isinstance(error, str) else error


COMPOSED = {}       # Hydra takes a quarter of a second for each configuration


def composed(words):
    """training_settings, each line once."""
    place = words[-1].removeprefix("run_dir=")
    line = tuple(words[:-1])
    if line not in COMPOSED:
        COMPOSED[line] = training_settings(words)
    settings = copy.deepcopy(COMPOSED[line])
    settings.run_dir = place
    return settings


def bench(monkeypatch, folder, machine, *words):
    """(exit code or error, result.json) of a bench on a simulated machine."""
    monkeypatch.setattr("forge.bench.session.Arm", machine.arm)
    monkeypatch.setattr("forge.bench.trial.training_settings", composed)
    monkeypatch.setattr("forge.bench.proof.find_spec", lambda name: None)
    try:
        code = run([*WORDS, *words, f"run_dir={folder}"])
    except ForgeError as error:
        code = error
    assert not machine.running
    path = folder / "result.json"
    return code, json.loads(path.read_text()) if path.exists() else None


def rows_of(result):
    return {row["name"]: row for row in result["rows"]}
