"""Which expert is chosen, with which weight, and what aux and load count: against sums written out by hand."""

import math

import pytest
import torch
from routings import chosen, routing


def _inputs(experts=4, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, 5, 6, generator=generator), torch.randn(experts, 6, generator=generator)


def test_ties_go_to_the_lower_expert_id():
    x = torch.tensor([[[1.0, 2.0]]])
    gate = torch.tensor([[1.0, 0.0], [3.0, 0.0], [1.0, 1.0], [1.0, 1.0]])      # logits 1, 3, 3, 3: exact
    for top_k in (1, 2, 3):
        choice = chosen(x, None, gate, routing(top_k=top_k))
        assert choice.experts.tolist() == [[1, 2, 3][:top_k]]


def test_equal_logits_of_many_experts_choose_the_first():
    x, _ = _inputs()
    choice = chosen(x, None, torch.zeros(64, 6), routing(num_experts=64, top_k=8))
    assert (choice.experts == torch.arange(8)).all()


@pytest.mark.parametrize("normalize", [True, False])
def test_weights_are_softmax_probabilities(normalize):
    x, gate = _inputs()
    choice = chosen(x, None, gate, routing(top_k=3, normalize=normalize))
    expected = (x.flatten(0, 1) @ gate.T).softmax(-1).topk(3).values
    if normalize:
        expected = expected / expected.sum(-1, keepdim=True)
    assert torch.allclose(choice.weights, expected, atol=1e-6)


def test_the_gate_is_float32_under_autocast():
    x, gate = _inputs()
    with torch.autocast("cpu", torch.bfloat16):
        choice = chosen(x, None, gate, routing())
    assert torch.equal(choice.weights, chosen(x, None, gate, routing()).weights)
    assert chosen(x.bfloat16(), None, gate.bfloat16(), routing()).weights.dtype == torch.float32


@pytest.mark.parametrize("scope", ["sequence", "batch"])
def test_aux_and_load_count_valid_tokens_only(scope):
    x, gate = _inputs()
    valid = torch.tensor([[True, True, True, False, False], [True, True, True, True, False]])
    how = routing(aux_loss=0.5, z_loss=0.25, aux_scope=scope)
    choice = chosen(x, valid, gate, how)

    expected, load = 0.0, [0] * 4
    logits = x @ gate.T
    groups = [[(b, t) for t in range(5) if valid[b, t]] for b in range(2)]
    groups = groups if scope == "sequence" else [groups[0] + groups[1]]
    for group in groups:
        mine = [logits[place].topk(2).indices.tolist() for place in group]
        f = [sum(e in row for row in mine) / len(group) for e in range(4)]
        p = [sum(float(logits[place].softmax(-1)[e]) for place in group) / len(group) for e in range(4)]
        expected += 0.5 * len(group) * 4 * sum(a * b for a, b in zip(f, p, strict=True))
        expected += 0.25 * sum(math.log(float(logits[place].exp().sum())) ** 2 for place in group)
        load = [count + sum(e in row for row in mine) for e, count in enumerate(load)]
    assert choice.aux.item() == pytest.approx(expected, rel=1e-5)
    assert choice.load.tolist() == load


def test_padding_may_hold_anything():
    """Not even nan in a padded position reaches aux and load."""
    x, gate = _inputs()
    valid = torch.ones(2, 5, dtype=torch.bool)
    valid[:, 3:] = False
    how = routing(aux_loss=1.0, z_loss=1.0, aux_scope="sequence")
    clean = chosen(x, valid, gate, how)
    x[:, 3:] = float("nan")
    dirty = chosen(x, valid, gate, how)
    assert torch.equal(clean.aux, dirty.aux) and torch.equal(clean.load, dirty.load)


def test_balance_gives_top_k():
    gate, x = torch.eye(4) * 1e-3, torch.eye(4).unsqueeze(0)    # each token prefers another expert
    choice = chosen(x, None, gate, routing(top_k=1, aux_loss=1.0))
    assert choice.aux.item() / 4 == pytest.approx(1.0, rel=1e-3)


def test_a_batch_without_valid_tokens_gives_zero():
    x, gate = _inputs()
    gate.requires_grad_()
    choice = chosen(x, torch.zeros(2, 5, dtype=torch.bool), gate, routing(aux_loss=1.0, z_loss=1.0))
    choice.aux.backward()
    assert choice.aux == 0 and choice.load.sum() == 0 and gate.grad.isfinite().all()
