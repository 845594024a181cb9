"""The auxiliary losses as moe_router=fused compiles them on a GPU, here on a CPU: recomputation may repeat them, and
may not count the update again.

Sums of at most 34 tokens in two orders: within 34 roundings of float32 of the sum of magnitudes, which the cancelling
parts of a gradient do not exceed by more than a factor of 8.
"""

import pytest
import torch
from routings import routing
from tiny import one_pass, tiny_batch, tiny_model

import forge.moe_router.choice as choice
import forge.moe_router.gate as gate
from forge.checkpointing.full import Full
from forge.checkpointing.selective import Selective
from forge.moe_router.fused_mixture import _compiled, _counted_imbalance
from forge.moe_router.mixture import Mixture

HOW = routing(aux_loss=0.5, z_loss=0.1, aux_scope="global_batch", normalize=True)


def choose_by(imbalance):
    """As FusedMixture.choose, with what is plain in place of its kernels."""
    def choose(mixture, x, valid):
        logits, how = gate.logits_of(x, mixture.gate.weight, 0.0), mixture.routing
        experts = gate.choose_experts(logits.detach().flatten(0, 1), how.top_k, 1, 1)
        weights = logits.flatten(0, 1).gather(-1, experts).softmax(-1)
        aux, so_far = imbalance(logits, experts, valid, how, mixture.memory(), mixture.training)
        load = choice.tokens_per_expert(experts, how.num_experts).float().expand(2, -1)
        return gate.Choice(experts, weights, aux, gate.with_update(load, so_far))

    return choose


@pytest.fixture
def counted(monkeypatch):
    """How often an update was counted."""
    calls, plain = [], choice.sum_over_ranks
    monkeypatch.setattr(choice, "sum_over_ranks", lambda load: calls.append(1) or plain(load))
    return calls


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", [lambda model: model, Full(), Selective(1, ["matmul"])],
                         ids=["kept", "full", "selective"])
def test_recomputation_repeats_it_and_counts_once(checkpointing, counted, monkeypatch):
    """In the second pass of an update, where counting again would see another load than forward did."""
    def second_pass(imbalance, wrap):
        monkeypatch.setattr(Mixture, "choose", choose_by(imbalance))
        model = wrap(tiny_model(layers=2, routing=HOW))
        one_pass(model, tiny_batch(seed=0))
        del counted[:]
        return one_pass(model, tiny_batch(seed=1)), len(counted)

    torch._dynamo.reset()
    (found, number), (wanted, _) = second_pass(_compiled(), checkpointing), second_pass(_counted_imbalance, lambda m: m)
    assert number == 2                  # once a layer
    for name, value in wanted.items():
        assert (found[name] - value).norm() <= 8 * 34 * 2**-24 * value.norm(), name
