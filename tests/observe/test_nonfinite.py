"""Where what is not finite arises, in whole runs whose weights are finite: planted options that spoil one number."""

import json
import os

import pytest
from conftest import TINY, forge
from planted import plant, train_planted

LINE = ["optimizer.max_skipped=1", "model.dropout=0"]

GATE = """
from dataclasses import dataclass
import torch
import torch.distributed as dist
from forge.moe_router.{router} import {option}

class Spoilt(torch.nn.Module):
    '''A gate, with nan for expert 2 at row 1, token 7 of the third micro-batch of each update.'''

    def __init__(self, gate, rank):
        super().__init__()
        self.weight, self.gate, self.rank, self.calls = gate.weight, [gate], rank, 0

    def forward(self, x):
        logits = self.gate[0](x)
        self.calls += 1
        if self.calls % 3 == 0 and self.rank == (dist.get_rank() if dist.is_initialized() else 0):
            logits = logits.clone()
            logits[1, 7, 2] = torch.nan
        return logits

@dataclass(frozen=True)
class Option:
    rank: int

    def build(self, width, hidden, routing):
        mixture = {option}().build(width, hidden, routing)
        mixture.gate = Spoilt(mixture.gate, self.rank)
        return mixture
"""

OPERATORS = """
from dataclasses import dataclass
import torch
from forge.operators.native import Native

class Backward(torch.autograd.Function):
    '''x, whose gradient has inf at row 0, token 3.'''

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        grad[0, 3, :2] = torch.inf
        return grad

def forward(x):
    x = x.clone()
    x[2, 5, 0], x[2, 6, :3] = torch.nan, -torch.inf
    return x

def passing(x):
    '''Spoilt in the first two updates of two passes, and never again.'''
    passing.calls += 1
    return forward(x) if passing.calls <= 4 else x

def failing(x):
    passing(x)
    if passing.calls > 6:
        raise RuntimeError("no second time\\nor third")
    return forward(x)

HOW = {"forward": forward, "backward": Backward.apply, "passing": passing, "failing": failing}

class Spoilt(torch.nn.Module):
    def __init__(self, how, norm=None):
        super().__init__()
        passing.calls = 0
        self.how, self.norm = how, norm

    def forward(self, x):
        return HOW[self.how](x if self.norm is None else self.norm(x))

@dataclass(frozen=True)
class Option(Native):
    how: str
    place: str

    def norm(self, width, kind, eps):
        norm = super().norm(width, kind, eps)
        return Spoilt(self.how, norm) if self.place == "norm" else norm

    def feed_forward(self, *settings):
        layer = super().feed_forward(*settings)
        if self.place == "activation":
            activation, how = layer.activation, HOW[self.how]
            layer.activation = lambda x: how(activation(x))
        return layer
"""


@pytest.fixture(scope="module")
def outside(tmp_path_factory):
    folder = tmp_path_factory.mktemp("outside")
    for router, option in (("loop", "Loop"), ("sorted", "Sorted"), ("fused", "Fused")):
        plant(folder, "moe_router", f"spoilt_{router}", GATE.format(router=router, option=option), rank=0)
    plant(folder, "operators", "spoilt", OPERATORS, how="forward", place="norm")
    return folder


def origin(run) -> str:
    """What the run says between the two sentences that it always says."""
    assert run.code == 1 and run.err.startswith("The gradient was not finite in 2 updates in a row, up to step 2")
    return run.err.split("nothing was learnt in them. ")[1].split(" Lower optimizer.lr")[0]


@pytest.mark.parametrize(("router", "how"), [
    ("loop", []), ("sorted", []), ("fused", []), ("sorted", ["compile=blocks"]), ("sorted", ["compile=whole"]),
    ("sorted", ["model.routing.jitter=0.1", "model.dropout=0.1", "precision=bf16"]),
    ("sorted", ["model.routing.balance=overflow", "model.routing.balance_ramp=0"])], ids=str)
def test_a_logit_of_a_router(router, how, shards, outside, tmp_path):
    run = train_planted(tmp_path / "run", outside, f"planted_spoilt_{router}", *shards, *LINE, *how,
                        f"moe_router=spoilt_{router}")
    assert origin(run) == ("It arose in blocks.0.feed_forward.gate: of 512 values, 1 nan, first at row 1, token 7 of "
                           "micro-batch 3.")
    assert [record["step"] for record in run.records] == [1, 2]
