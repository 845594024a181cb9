"""What forward decided, recomputation repeats and does not decide again: an operator that tells the difference."""

import subprocess
import sys
from itertools import count
from pathlib import Path

import pytest
import torch
from torch import nn

from forge.checkpointing.full import Full
from forge.checkpointing.none import KeepAll
from forge.checkpointing.selective import Selective
from forge.decisions import DECISIONS, decision

_calls = count(1)


@decision("decides_anew_each_time")
def decide(x: torch.Tensor) -> torch.Tensor:
    return torch.full_like(x, next(_calls))


@decide.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x):
        return x + (self.weight * decide(x.detach())).sin()


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x):
        return self.compute(x)

    def compute(self, x):
        for block in self.blocks:
            x = block(x)
        return x

    def block_lists(self):
        return [self.blocks]


@pytest.mark.parametrize("compiled", [None, "blocks", "whole"])
@pytest.mark.parametrize("option", [KeepAll(), Full(), Selective(1, []), Selective(2, ["matmul"])], ids=repr)
def test_a_decision_is_made_once(option, compiled):
    torch._dynamo.reset()
    model = option(Model())
    if compiled == "whole":
        model.compute = torch.compile(model.compute, backend="aot_eager", fullgraph=True)
    for block in model.blocks if compiled == "blocks" else ():
        block.compile(backend="aot_eager", fullgraph=True)
    first = next(_calls)
    model(torch.zeros(3, requires_grad=True)).sum().backward()
    assert next(_calls) == first + 4            # three blocks, one decision each
    for number, block in enumerate(model.blocks, first + 1):
        assert torch.allclose(block.weight.grad, number * torch.tensor(float(number)).cos())


def test_without_the_list_it_would_be_made_twice(monkeypatch):
    import forge.checkpointing.recompute as recompute

    monkeypatch.setattr(recompute, "DECISIONS", set())
    first = next(_calls)
    Full()(Model())(torch.zeros(3, requires_grad=True)).sum().backward()
    assert next(_calls) == first + 7


def test_routing_decides_by_such_operators():
    import forge.moe_router.gate  # noqa: F401

    names = {operator.name().split("::")[1] for operator in DECISIONS}
    assert {"choose_experts", "drop_surplus", "reroute", "count_over_update"} <= names


def test_a_dense_model_pays_for_no_decisions():
    """In a process of its own, since what decides is registered where it is imported."""
    program = ("import sys; sys.path.insert(0, 'tests')\n"
               "from tiny import tiny_model\nfrom forge.checkpointing.full import Full\n"
               "print(*('context_fn' in block.forward.how for block in Full()(tiny_model()).blocks))")
    done = subprocess.run([sys.executable, "-c", program.replace("'tests'", repr(str(Path(__file__).parents[1])))],
                          capture_output=True, text=True)
    assert done.stdout.split() == ["False"] * 3, done.stderr
