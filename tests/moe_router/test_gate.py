"""Which expert is chosen, with which weight, and what aux and load count: against sums written out by hand."""

import math

import pytest
import torch
from routings import chosen, routing
from torch.utils.checkpoint import checkpoint


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
    assert choice.load[0].tolist() == load and choice.load[1].sum() == 2 * 10


def test_padding_may_hold_anything():
    """Not even nan in a padded position reaches aux and load."""
    x, gate = _inputs()
    valid = torch.ones(2, 5, dtype=torch.bool)
    valid[:, 3:] = False
    how = routing(aux_loss=1.0, z_loss=1.0, aux_scope="sequence")
    clean = chosen(x, valid, gate, how)
    x[:, 3:] = float("nan")
    dirty = chosen(x, valid, gate, how)
    assert torch.equal(clean.aux, dirty.aux) and torch.equal(clean.load[0], dirty.load[0])


def test_balance_gives_top_k():
    gate, x = torch.eye(4) * 1e-3, torch.eye(4).unsqueeze(0)    # each token prefers another expert
    choice = chosen(x, None, gate, routing(top_k=1, aux_loss=1.0))
    assert choice.aux.item() / 4 == pytest.approx(1.0, rel=1e-3)


def test_a_batch_without_valid_tokens_gives_zero():
    x, gate = _inputs()
    gate.requires_grad_()
    choice = chosen(x, torch.zeros(2, 5, dtype=torch.bool), gate, routing(aux_loss=1.0, z_loss=1.0))
    choice.aux.backward()
    assert choice.aux == 0 and choice.load[0].sum() == 0 and choice.load[1].sum() == 20 and gate.grad.isfinite().all()


# ---- scores, biases, groups

def _softmax(values):
    total = sum(math.exp(value) for value in values)
    return [math.exp(value) / total for value in values]


def _sigmoid(value):
    return 1 / (1 + math.exp(-value))


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("score", ["softmax", "softmax_of_chosen", "sigmoid"])
def test_weights_of_every_score(score, normalize):
    x, gate = _inputs(6)
    choice = chosen(x, None, gate, routing(num_experts=6, top_k=3, score=score, normalize=normalize, scale=1.5))
    for row, logits in enumerate((x.flatten(0, 1) @ gate.T).tolist()):
        best = sorted(range(6), key=lambda one: -logits[one])[:3]
        assert choice.experts[row].tolist() == best
        mine = {"softmax": [_softmax(logits)[one] for one in best],
                "softmax_of_chosen": _softmax([logits[one] for one in best]),
                "sigmoid": [_sigmoid(logits[one]) for one in best]}[score]
        whole = sum(mine) if normalize else 1.0
        assert choice.weights[row].tolist() == pytest.approx([1.5 * weight / whole for weight in mine], rel=1e-5)


def test_tiny_sigmoid_scores_still_sum_to_one():
    """With a small number added to their sum, a router could escape its auxiliary loss by making all scores small."""
    x, gate = torch.tensor([[[1.0]]]), torch.tensor([[-200.0], [-201.0], [-300.0]]).requires_grad_()
    choice = chosen(x, None, gate, routing(num_experts=3, score="sigmoid", normalize=True, aux_loss=1.0))
    assert choice.weights.tolist() == [pytest.approx(_softmax([0, -1]), rel=1e-5)]
    assert choice.aux.item() == pytest.approx(3.0, rel=1e-5)          # both chosen experts have all the probability
    choice.weights[0, 0].backward()
    assert gate.grad.isfinite().all() and gate.grad[0] != 0


@pytest.mark.parametrize("score", ["softmax", "softmax_of_chosen", "sigmoid"])
def test_a_bias_changes_the_choice_and_no_weight(score):
    x, gate = _inputs(6)
    bias = torch.tensor([0.0, 0.3, -0.2, 0.0, 0.1, 0.0])
    how = routing(num_experts=6, score=score)
    choice = chosen(x, None, gate.requires_grad_(), how, bias=bias.requires_grad_())
    logits = (x.flatten(0, 1) @ gate.T).tolist()
    others = 0
    for row, own in enumerate(logits):
        of = {"softmax": _softmax(own), "softmax_of_chosen": own, "sigmoid": list(map(_sigmoid, own))}[score]
        best = sorted(range(6), key=lambda one: -of[one] - bias[one].item())[:2]
        others += best != sorted(range(6), key=lambda one: -of[one])[:2]
        assert choice.experts[row].tolist() == best
        mine = _softmax([own[one] for one in best]) if score == "softmax_of_chosen" else [of[one] for one in best]
        assert choice.weights[row].tolist() == pytest.approx(mine, rel=1e-5)
    assert others
    choice.weights.sum().backward()
    assert bias.grad is None and gate.grad is not None


def test_groups_are_chosen_by_the_sum_of_their_two_best():
    """Six experts, three groups. Sums of two: 0.9 + 0.0, 0.6 + 0.5, 0.5 + 0.5: the best expert's group is left out."""
    sigmoids = torch.tensor([0.9, 1e-6, 0.6, 0.5, 0.5, 0.5])
    gate = sigmoids.logit().unsqueeze(-1)
    for top_groups, wanted in ((1, [2, 3]), (2, [2, 3]), (3, [0, 2])):
        how = routing(num_experts=6, score="sigmoid", num_groups=3, top_groups=top_groups)
        choice = chosen(torch.ones(1, 1, 1), None, gate, how)
        assert choice.experts.tolist() == [wanted]
        assert choice.weights[0].tolist() == pytest.approx([sigmoids[one].item() for one in wanted], rel=1e-5)


@pytest.mark.parametrize("score", ["softmax", "softmax_of_chosen", "sigmoid"])
def test_auxiliary_losses_of_every_score(score):
    """p: the softmax of all logits, or sigmoid scores over their sum (DeepSeek-V3)."""
    x, gate = _inputs()
    choice = chosen(x, None, gate, routing(score=score, aux_loss=0.5, z_loss=0.25))
    logits = (x.flatten(0, 1) @ gate.T).tolist()
    p = [_softmax(own) for own in logits]
    if score == "sigmoid":
        p = [[_sigmoid(value) / sum(map(_sigmoid, own)) for value in own] for own in logits]
    best = [sorted(range(4), key=lambda one: -own[one])[:2] for own in logits]
    f = [sum(one in row for row in best) / 10 for one in range(4)]
    expected = 0.5 * 4 * sum(f[one] * sum(row[one] for row in p) for one in range(4))
    expected += 0.25 * sum(math.log(sum(map(math.exp, own))) ** 2 for own in logits)
    assert choice.aux.item() == pytest.approx(expected, rel=1e-5)


def test_aux_over_the_global_batch_counts_what_came_before():
    x, gate = _inputs()
    how = routing(aux_loss=0.5, aux_scope="global_batch")
    seen = torch.tensor([7.0, 1.0, 4.0, 8.0])           # of ten tokens
    choice = chosen(x, None, gate, how, load_so_far=seen)
    assert torch.equal(choice.load[2], choice.load[0] + seen)
    f = choice.load[2] / 20
    p = (x.flatten(0, 1) @ gate.T).softmax(-1).sum(0)
    assert choice.aux.item() == pytest.approx(0.5 * 4 * float((f * p).sum()), rel=1e-5)
    first, batch = chosen(x, None, gate, how), chosen(x, None, gate, routing(aux_loss=0.5))
    assert first.aux.item() == pytest.approx(batch.aux.item(), rel=1e-6)    # the first of an update has nothing before
    judged = chosen(x, None, gate, how, training=False, load_so_far=seen)
    assert torch.equal(judged.aux, batch.aux) and len(judged.load) == 2


def test_jitter_multiplies_what_the_gate_sees_in_training():
    x, gate = _inputs()
    how, plain = routing(jitter=0.1), chosen(x, None, gate, routing())
    torch.manual_seed(5)
    noise = 1 + 0.1 * (2 * torch.rand(2, 5, 6) - 1)
    torch.manual_seed(5)
    noisy = chosen(x, None, gate, how)
    assert torch.equal(noisy.weights, chosen(x * noise, None, gate, routing()).weights)
    assert not torch.equal(noisy.weights, plain.weights)
    assert torch.equal(chosen(x, None, gate, how, training=False).weights, plain.weights)


@pytest.mark.parametrize("score", ["softmax", "softmax_of_chosen", "sigmoid"])
@pytest.mark.parametrize("more", [{}, {"num_groups": 2, "top_groups": 1}, {"balance": "overflow", "balance_ramp": 0},
                                  {"capacity_factor": 1.0}], ids=str)
def test_a_gate_of_nan_gives_ids_and_weights_of_nan(score, more):
    x, gate = _inputs()
    gate[2, 0] = torch.nan
    choice = chosen(x, None, gate, routing(score=score, aux_loss=1.0, z_loss=1.0, **more))
    for row in choice.experts.tolist():
        kept = [one for one in row if one < 4]
        assert len(set(kept)) == len(kept) and all(0 <= one <= 4 for one in row)
    assert choice.weights.isnan().any() and choice.aux.isnan()


@pytest.mark.slow
def test_gradients_of_sigmoid_scores_survive_compilation_of_what_is_recomputed():
    """Sums of a few terms: within 16 roundings of float32. torch's own logarithm of a sigmoid is wrong by a third."""
    x, gate = _inputs()
    how = routing(score="sigmoid", normalize=True, aux_loss=1.0)

    def run(gate):
        choice = chosen(x, None, gate, how)
        return (choice.weights * torch.arange(2.0)).sum() + choice.aux

    def gradient(function):
        own = gate.clone().requires_grad_()
        function(own).backward()
        return own.grad

    torch._dynamo.reset()
    found = gradient(torch.compile(lambda gate: checkpoint(run, gate, use_reentrant=False), fullgraph=True))
    wanted = gradient(run)
    assert (found - wanted).norm() <= 16 * 2**-24 * wanted.norm()
