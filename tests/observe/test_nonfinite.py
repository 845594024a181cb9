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
    '''x, whose gradient has inf at row 0, token 3; of a vector at 3.'''

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        grad[(0, 3, slice(2)) if grad.dim() == 3 else 3] = torch.inf
        return grad

def forward(x):
    x = x.clone()
    x[2, 5, 0], x[2, 6, :3] = torch.nan, -torch.inf
    return x

def passing(x):
    '''Spoilt in the passes of three updates, and never again.'''
    passing.calls += 1
    return forward(x) if passing.calls <= 3 else x

def recurring(x):
    '''Spoilt in the passes of two updates, and where what the second was given comes again.'''
    passing.calls += 1
    if passing.calls <= 2:
        recurring.given = x.detach()
    return forward(x) if torch.equal(x, recurring.given) else x

def failing(x):
    passing(x)
    if passing.calls > 3:
        raise RuntimeError("no second time\\nor third")
    return forward(x)

HOW = {"forward": forward, "backward": Backward.apply, "passing": passing,
       "recurring": recurring, "failing": failing}

class Spoilt(torch.nn.Module):
    def __init__(self, how, place, norm):
        super().__init__()
        self.how, self.place, self.norm = HOW[how], place, norm

    def forward(self, x):
        if self.place == "before":
            return self.norm(self.how(x))
        return self.how(self.norm(x)) if self.place == "after" else self.norm(x) + 0 * self.how(self.norm.weight)

@dataclass(frozen=True)
class Option(Native):
    how: str
    place: str

    def norm(self, width, kind, eps):
        norm = super().norm(width, kind, eps)
        return norm if self.place == "activation" else Spoilt(self.how, self.place, norm)

    def feed_forward(self, *settings):
        layer, passing.calls = super().feed_forward(*settings), 0
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
    plant(folder, "operators", "spoilt", OPERATORS, how="forward", place="after")
    return folder


def origin(run) -> str:
    """What the run says between the two sentences that it always says."""
    assert run.code == 1 and run.err.startswith("The gradient was not finite in 2 updates in a row, up to step 2")
    return run.err.split("nothing was learnt in them. ")[1].split(" Lower optimizer.lr")[0]


@pytest.mark.parametrize(("router", "how"), [
    ("loop", []), ("sorted", []), ("fused", []),
    ("sorted", ["model.routing.jitter=0.1", "model.dropout=0.1", "precision=bf16"]),
    ("sorted", ["model.routing.balance=overflow", "model.routing.balance_ramp=0"])], ids=str)
def test_a_logit_of_a_router(router, how, shards, outside, tmp_path):
    run = train_planted(tmp_path / "run", outside, f"planted_spoilt_{router}", *shards, *LINE, *how,
                        f"moe_router=spoilt_{router}")
    assert origin(run) == ("It arose in blocks.0.feed_forward.gate: of 512 values, 1 nan, first at row 1, token 7 of "
                           "micro-batch 3.")
    assert [record["step"] for record in run.records] == [1, 2]


DENSE = ["model.routing=null", "operators=spoilt"]
FORWARD = "of 4,096 values, 1 nan and 3 inf, first at row 2, token 5 of micro-batch 1."
BACKWARD = "in the gradient of what {} gives: of {} values, {} inf, first at row 0, token 3 of micro-batch 1."
IN_SWIGLU = f"It arose in blocks.1.feed_forward, {BACKWARD.format('up', '8,192', 4)}"       # each number is of two
KNOWN = "Where it arose is not known: all weights are finite, and so were the passes of step 2 when taken once more"


@pytest.mark.parametrize(("how", "place", "more", "said"), [
    ("forward", "after", [], f"It arose in blocks.0.attention_norm: {FORWARD}"),
    ("forward", "activation", [], f"It arose in blocks.0.feed_forward, in what down is given: {FORWARD}"),
    ("forward", "after", ["compile=blocks", "model.layers=1", "precision=fp32"],
     f"It arose in blocks.0.attention_norm: {FORWARD}"),
    ("backward", "before", [], "It arose in final_norm, in the gradient of what it is given: of 4,096 values, 2 inf, "
                               "first at row 0, token 3 of micro-batch 1."),
    ("backward", "weight", [], "It arose in the gradient of final_norm.norm.weight: of 32 values, 1 inf, first at "
                               "index [3] of micro-batch 1."),
    ("backward", "after", [], f"It arose in final_norm, {BACKWARD.format('norm', '4,096', 2)}"),
    ("backward", "activation", [], IN_SWIGLU),
    ("backward", "activation", ["checkpointing=full"], IN_SWIGLU),
    ("backward", "activation", ["checkpointing=selective", "checkpointing.save=[matmul]"], IN_SWIGLU),
], ids=str)
def test_a_number_of_a_dense_model(how, place, more, said, shards, outside, tmp_path):
    run = train_planted(tmp_path / "run", outside, "planted_spoilt", *shards, *LINE, *DENSE, *more,
                        f"operators.how={how}", f"operators.place={place}")
    assert origin(run) == said


@pytest.mark.parametrize(("how", "said"), [
    ("recurring", "It arose in blocks.0.feed_forward, in what down is given: of 12,288 values, "),
    ("passing", KNOWN), ("failing", "Looking for where it arose failed: RuntimeError: no second time.")])
def test_the_same_update_is_looked_at_and_may_be_finite_now(how, said, shards, outside, tmp_path):
    run = train_planted(tmp_path / "run", outside, "planted_spoilt", *shards, *LINE, *DENSE, "model.layers=1",
                        "micro_batch=12", "operators.place=activation", f"operators.how={how}", "optimizer.lr=1e-30",
                        "optimizer.weight_decay=0")
    assert origin(run).startswith(said)


def test_weights_are_named_before_any_pass(shards, outside, tmp_path):
    """A rate that no weight survives: the first update makes them infinite."""
    run = train_planted(tmp_path / "run", outside, "planted_spoilt", *shards, *LINE, "schedule.warmup=0",
                        "optimizer.clip=null", "optimizer.lr=1e38", "optimizer.weight_decay=1e38")
    assert run.code == 1 and "Not finite are the weights of " in run.err


@pytest.mark.dist
@pytest.mark.parametrize("how", [
    [], ["parallel=expert", "parallel.size=2", "model.routing.aux_scope=global_batch", "model.routing.aux_loss=0.1"]],
    ids=["data", "expert"])
def test_one_rank_alone(how, shards, outside, tmp_path):
    """All ranks look, also where their passes need each other, and all say what the second one found."""
    done = forge("train", *TINY, *shards, *LINE, *how, f"run_dir={tmp_path / 'run'}", "moe_router=spoilt_sorted",
                 "moe_router.rank=1", "hardware.processes=2", "micro_batch=2", "allowed_packages=planted_spoilt_sorted",
                 f"--config-dir={outside / 'conf'}",
                 env={"PYTHONPATH": f"{outside}:{os.environ.get('PYTHONPATH', '')}"})
    said = [json.loads((tmp_path / f"run/failures/rank_{rank}.json").read_text())["message"] for rank in (0, 1)]
    assert done.returncode == 1 and said[0] == said[1] and said[0] in done.stderr
    assert ("It arose in blocks.0.feed_forward.gate: of 256 values, 1 nan, first at row 1, token 7 of micro-batch 3 on "
            "rank 1.") in said[0]
