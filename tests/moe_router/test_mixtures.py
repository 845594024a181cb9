"""What tests/gpu/test_routers.py compares, on a CPU: the cases hold there, and a router that is wrong is found."""

import pytest
import torch
from mixtures import (
    OPTIONS,
    Case,
    assert_equal_to_the_loop,
    assert_no_memory_is_read_before_it_is_written,
    inputs,
    mixture,
    option,
)

from forge.moe_router.mixture import Mixture
from forge.moe_router.sorted import Sorted

HERE = [name for name in OPTIONS if name != "sonic"]        # which runs on a GPU only
CASES = [Case(1, 1, 1, 16, 8), Case(1, 8, 32, 24, 8), Case(17, 3, 5, 20, 12), Case(65, 2, 8, 16, 8, aimed=True),
         Case(65, 2, 8, 16, 8, capacity=1.0)]


@pytest.mark.parametrize("name", HERE)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_cases_hold(name, case):
    plain = assert_equal_to_the_loop(option(name), case, "cpu", torch.float32)
    assert not case.aimed or plain["load"][0].tolist() == [0] * 6 + [63] * 2
    assert_no_memory_is_read_before_it_is_written(option(name), case, "cpu", torch.float32)


def test_logits_are_exact():
    """In float32 as in float64: no order of summation changes a choice."""
    case = Case(300, 2, 64, 200, 8)
    made, (x, _, _) = mixture(Sorted(), case, "cpu", torch.float32), inputs(case, "cpu", torch.float32)
    logits = x @ made.gate.weight.T
    assert torch.equal(logits.double(), x.double() @ made.gate.weight.double().T)
    assert logits.std() > 1 and len(logits.unique()) < logits.numel() / 10, "there are ties"


class Wrong:
    """Sorted, and what comes out changed by `edit`."""

    def __init__(self, edit):
        self.edit = edit

    def build(self, width, hidden, how):
        from forge.moe_router.experts import by_sorting

        return Mixture(width, hidden, how, lambda *told: self.edit(by_sorting(*told)))


@pytest.mark.parametrize("edit", [lambda y: y * (1 + 1e-4), lambda y: y.detach() + (y - y.detach()) * 1.001,
                                  lambda y: y.index_fill(0, torch.tensor([16]), float("nan"))])
def test_a_router_that_is_wrong_is_found(edit):
    with pytest.raises(AssertionError):
        assert_equal_to_the_loop(Wrong(edit), Case(17, 3, 5, 20, 12), "cpu", torch.float32)


def test_a_router_that_reads_what_it_never_wrote_is_found():
    def read(y):
        return torch.cat([y, torch.empty_like(y)])[: len(y)] + 0 * torch.empty_like(y)

    with pytest.raises(AssertionError):
        assert_no_memory_is_read_before_it_is_written(Wrong(read), Case(17, 3, 5, 20, 12), "cpu", torch.float32)
