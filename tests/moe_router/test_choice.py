"""Groups, capacity and overflow: the operators against plain Python, choice by choice, exactly."""

import math

import pytest
import torch
from routings import chosen, routing

from forge.moe_router.choice import choose_experts, drop_surplus, places
from forge.moe_router.overflow import reroute


def best_first(keys):
    """Ids, the highest key first, of equal ones the lower id."""
    return sorted(range(len(keys)), key=lambda one: (-keys[one], one))


def allowed(keys, groups, top_groups):
    """Ids of the experts that a token may choose, best first."""
    size = len(keys) // groups
    of = [keys[group * size:(group + 1) * size] for group in range(groups)]
    best = best_first([sum(sorted(some, reverse=True)[:2]) for some in of])[:top_groups]
    return [one for one in best_first(keys) if one // size in best]


def surplus_of(choices, scores, limit):
    """(token, slot) of what each expert holds too much, as its lowest scores, of equal ones the higher token ids."""
    held = {}
    for (token, slot), expert in choices.items():
        held.setdefault(expert, []).append((-scores[token][slot], token, slot))
    return {(token, slot) for some in held.values() for _, token, slot in sorted(some)[limit:]}


def rerouted(keys, experts, scores, limit, groups, top_groups):
    """The rule of forge.moe_router.overflow, token by token."""
    experts = [list(row) for row in experts]
    choices = {(n, slot): e for n, row in enumerate(experts) for slot, e in enumerate(row)}
    load = [list(choices.values()).count(e) for e in range(len(keys[0]))]
    surplus = surplus_of(choices, scores, limit)
    for _, token, slot in sorted((-scores[n][slot], n, slot) for n, slot in surplus):
        for other in allowed(keys[token], groups, top_groups):
            if load[other] < limit and other not in experts[token]:
                load[other] += 1
                experts[token][slot] = other
                break
    return experts


def _keys(tokens, experts, seed, steps=None):
    """Random, or of so few values that most are ties; the first experts are liked best, so that some overflow."""
    generator = torch.Generator().manual_seed(seed)
    keys = torch.rand(tokens, experts, generator=generator) - torch.arange(experts) / experts
    return keys if steps is None else (keys * steps).floor() / steps


@pytest.mark.parametrize("steps", [None, 3])
@pytest.mark.parametrize(("experts", "groups", "top_groups", "top_k"), [
    (8, 1, 1, 3), (8, 4, 2, 4), (8, 2, 1, 4), (6, 6, 3, 2), (12, 3, 2, 5), (5, 1, 1, 5)])
def test_groups_and_ties(experts, groups, top_groups, top_k, steps):
    keys = _keys(40, experts, 0, steps)
    found = choose_experts(keys, top_k, groups, top_groups)
    assert found.tolist() == [allowed(row, groups, top_groups)[:top_k] for row in keys.tolist()]


def test_a_masked_group_is_never_chosen_not_even_for_minus_infinity():
    keys = torch.tensor([[-1.0, -2.0, -math.inf, 5.0, 4.0, -math.inf]])
    assert choose_experts(keys, 3, 2, 1).tolist() == [[3, 4, 5]]


@pytest.mark.parametrize("groups", [1, 2])
def test_nan_keys_give_distinct_ids(groups):
    keys = torch.full((3, 8), torch.nan)
    keys[1, :5] = 1.0
    found = choose_experts(keys, 4, groups, 1)
    assert all(len(set(row)) == 4 and set(row) <= set(range(8)) for row in found.tolist())


def test_places():
    experts = torch.tensor([[0, 1], [1, 0], [0, 2], [0, 1]])
    scores = torch.tensor([[0.5, 0.1], [0.9, 0.5], [0.7, 0.2], [0.1, 0.9]])
    assert places(experts, scores, 3).tolist() == [[1, 2], [0, 2], [0, 0], [3, 1]]


@pytest.mark.parametrize("limit", [0, 1, 3, 10, 100])
@pytest.mark.parametrize("steps", [None, 3])
def test_capacity_keeps_the_highest_scores(limit, steps):
    keys = _keys(30, 6, 1, steps)
    experts = choose_experts(keys, 2, 1, 1)
    scores = keys.gather(1, experts)
    found = drop_surplus(experts, scores, torch.tensor(limit), 6)
    choices = {(n, slot): e for n, row in enumerate(experts.tolist()) for slot, e in enumerate(row)}
    wanted = experts.clone()
    for token, slot in surplus_of(choices, scores.tolist(), limit):
        wanted[token, slot] = 6
    assert torch.equal(found, wanted)


@pytest.mark.parametrize("limit", [0, 1, 4, 9, 11, 40])
@pytest.mark.parametrize("steps", [None, 4])
@pytest.mark.parametrize(("experts", "groups", "top_groups", "top_k"), [
    (6, 1, 1, 1), (6, 1, 1, 3), (8, 4, 2, 3), (5, 1, 1, 5), (16, 1, 1, 4), (1, 1, 1, 1)])
def test_overflow_equals_the_rule_token_by_token(experts, groups, top_groups, top_k, steps, limit):
    for seed in range(3):
        keys = _keys(33, experts, seed, steps)
        chosen = choose_experts(keys, top_k, groups, top_groups)
        scores = keys.sigmoid().gather(1, chosen)
        found = reroute(keys, chosen, scores, torch.tensor(limit), groups, top_groups)
        wanted = rerouted(keys.tolist(), chosen.tolist(), scores.tolist(), limit, groups, top_groups)
        assert found.tolist() == wanted
        assert all(len(set(row)) == top_k for row in wanted)


def test_tokens_that_all_like_the_same_experts_fill_one_after_the_other():
    """The worst case: every stretch fills one expert. 32 choices, 4 to an expert at most: all eight are filled."""
    keys = -torch.arange(8.0).expand(32, 8)
    found = reroute(keys, torch.zeros(32, 1, dtype=torch.int64), torch.ones(32, 1), torch.tensor(4), 1, 1)
    assert found.flatten().tolist() == [token // 4 for token in range(32)]


def test_operators_take_no_tokens():
    none = torch.zeros(0, 2, dtype=torch.int64)
    limit = torch.tensor(1)
    assert choose_experts(torch.zeros(0, 4), 2, 2, 1).shape == (0, 2)
    assert drop_surplus(none, torch.zeros(0, 2), limit, 4).shape == (0, 2)
    assert reroute(torch.zeros(0, 4), none, torch.zeros(0, 2), limit, 1, 1).shape == (0, 2)


# ---- the same through choose: limits from capacity_factor and threshold, weights of what is used

def _x(tokens=24, width=6, seed=0):
    """As logits, with the gate of ones below: expert 0 is liked best."""
    x = torch.randn(1, tokens, width, generator=torch.Generator().manual_seed(seed))
    return x + torch.tensor([2.0, 1.0, 0.0, 0.0, 0.0, 0.0])


GATE = torch.eye(6)
OVERFLOW = {"num_experts": 6, "top_k": 2, "balance": "overflow", "balance_ramp": 0, "threshold": 1.25}


@pytest.mark.parametrize("score", ["softmax", "softmax_of_chosen", "sigmoid"])
def test_weights_are_those_of_the_experts_that_are_used(score):
    x, how = _x(), routing(score=score, **OVERFLOW)
    choice, logits = chosen(x, None, GATE, how), _x()[0]
    limit = int(1.25 * 24 * 2 / 6)
    scores = logits.sigmoid() if score == "sigmoid" else logits.softmax(-1)
    plain = choose_experts(logits, 2, 1, 1)
    wanted = rerouted(logits.tolist(), plain.tolist(), scores.gather(1, plain).tolist(), limit, 1, 1)
    assert choice.experts.tolist() == wanted and wanted != plain.tolist()
    mine = torch.tensor([[float(logits[n, e]) for e in row] for n, row in enumerate(wanted)])
    expected = mine.softmax(-1) if score == "softmax_of_chosen" else scores.gather(1, choice.experts)
    assert torch.allclose(choice.weights, expected, atol=1e-6)
    before, after = choice.load.tolist()
    assert before == torch.bincount(plain.flatten(), minlength=6).tolist()
    assert after == torch.bincount(choice.experts.flatten(), minlength=6).tolist()
    assert max(before) > limit >= max(after)


def test_rerouted_weights_sum_to_one_again():
    choice = chosen(_x(), None, GATE, routing(normalize=True, scale=2.5, **OVERFLOW))
    assert torch.allclose(choice.weights.sum(-1), torch.tensor(2.5))
    mine = _x()[0].softmax(-1).gather(1, choice.experts)
    assert torch.allclose(choice.weights, 2.5 * mine / mine.sum(-1, keepdim=True), atol=1e-6)


@pytest.mark.parametrize("off", [
    {"threshold": None}, {"balance": "none"}, {"threshold": 1e30}, {"balance_from": 1}, {"balance_ramp": 7},
    {"training": False}], ids=str)
def test_off_is_the_plain_router_to_the_bit(off):
    """Also at its first update a ramp has no effect yet."""
    how = {**OVERFLOW, **off}
    training = how.pop("training", True)
    x, others = _x(), {"aux_loss": 0.1, "z_loss": 0.1}
    one = chosen(x, None, GATE, routing(**how, **others), training)
    plain = chosen(x, None, GATE, routing(num_experts=6, top_k=2, **others), training)
    assert torch.equal(one.experts, plain.experts) and torch.equal(one.weights, plain.weights)
    assert torch.equal(one.aux, plain.aux)
    assert torch.equal(one.load, plain.load) and torch.equal(*plain.load)


@pytest.mark.parametrize(("updates", "part"), [(2, None), (3, 1 / 4), (4, 2 / 4), (5, 3 / 4), (6, 1), (60, 1)])
def test_the_ramp_divides_the_threshold(updates, part):
    how = routing(**{**OVERFLOW, "balance_from": 2, "balance_ramp": 4, "threshold": 1.5})
    choice = chosen(_x(), None, GATE, how, num_updates=torch.tensor(float(updates)), mean_load=torch.tensor(4.0))
    limit = 48 if part is None else int(1.5 * 4 / part)
    plain = choose_experts(_x()[0], 2, 1, 1)
    wanted = rerouted(_x()[0].tolist(), plain.tolist(), _x()[0].softmax(-1).gather(1, plain).tolist(), limit, 1,
                      1)
    assert choice.experts.tolist() == wanted


MANY = torch.arange(200).expand(1, 200) >= 180         # of which 20 have a target


@pytest.mark.parametrize("how", [
    {"capacity_factor": 1.5}, {"balance": "overflow", "balance_ramp": 0, "threshold": 1.5}], ids=str)
def test_tokens_without_a_target_are_limited_and_reported_too(how):
    """An expert computes them, so they take room: at most 1.5 times 200 * 2 / 6 choices, whoever has a target."""
    x, how = _x(200), routing(num_experts=6, top_k=2, **how)
    choice, plain = chosen(x, MANY, GATE, how), choose_experts(x[0], 2, 1, 1)
    scores = x[0].softmax(-1).gather(1, plain).tolist()
    if how.balance == "overflow":
        wanted = rerouted(x[0].tolist(), plain.tolist(), scores, 100, 1, 1)
    else:
        wanted = plain.tolist()
        choices = {(n, slot): e for n, row in enumerate(wanted) for slot, e in enumerate(row)}
        for token, slot in surplus_of(choices, scores, 100):
            wanted[token][slot] = 6
    assert choice.experts.tolist() == wanted
    computed = torch.bincount(choice.experts.flatten(), minlength=7)[:6]
    assert torch.bincount(plain.flatten()).max() > 100 == computed.max()
    assert choice.load[1].tolist() == computed.tolist()
    assert choice.load[0].tolist() == torch.bincount(plain[180:].flatten(), minlength=6).tolist()


def test_few_tokens_are_not_all_dropped():
    """1.25 * 3 / 6 of a choice is one."""
    how = routing(num_experts=6, top_k=1, capacity_factor=1.25)
    choice = chosen(_x(3) + torch.eye(6)[0] * 9, None, GATE, how)
    assert choice.load.tolist() == [[3, 0, 0, 0, 0, 0], [1, 0, 0, 0, 0, 0]]


def test_capacity_is_of_training_only():
    how = routing(num_experts=6, top_k=2, capacity_factor=1.0)
    choice = chosen(_x(), None, GATE, how)
    plain = choose_experts(_x()[0], 2, 1, 1)
    assert (choice.experts == 6).any() and torch.equal(choice.weights, _x()[0].softmax(-1).gather(1, plain))
    assert choice.load[0].sum() == 48 and choice.load[1].max() == 8 == 48 / 6
    judged = chosen(_x(), None, GATE, how, training=False)
    assert torch.equal(judged.experts, plain) and torch.equal(*judged.load)
