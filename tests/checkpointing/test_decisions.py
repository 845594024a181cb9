"""What forward decided, recomputation repeats and does not decide again: an operator that tells the difference."""

from itertools import count

import pytest
import torch
from routings import routing
from tiny import tiny_model
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

    def decisions(self):
        return {torch.ops.forge.decides_anew_each_time.default}


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


def test_of_a_model_that_does_not_say_so_it_would_be_made_twice(monkeypatch):
    monkeypatch.setattr(Model, "decisions", lambda model: frozenset())
    first = next(_calls)
    Full()(Model())(torch.zeros(3, requires_grad=True)).sum().backward()
    assert next(_calls) == first + 7


def test_routing_decides_by_such_operators():
    names = {operator.name().split("::")[1] for operator in tiny_model(routing=routing()).decisions()}
    assert {"choose_experts", "drop_surplus", "reroute", "count_over_update"} <= names


def test_a_dense_model_pays_for_no_decisions():
    """Whatever else has been imported into its process: it is recomputed without looking at its operators."""
    def looks(**settings):
        return ["context_fn" in block.forward.how for block in Full()(tiny_model(**settings)).blocks]

    assert DECISIONS and looks(routing=None, layers=2) == [False, False]
    assert looks(routing=routing(), layers=2) == [True, True]
