"""What a mixture remembers: when it changes, by how much, and that nothing else changes it."""

import copy

import pytest
import torch
from routings import routing
from tiny import one_pass, tiny_batch, tiny_model

from forge.checkpointing.full import Full
from forge.checkpointing.selective import Selective
from forge.moe_router.memory import Memory
from forge.moe_router.sorted import Sorted
from forge.optimizer import Outcome
from forge.optimizer.groups import freeze
from forge.precision.bf16_pure import BF16Pure

YES, NO = torch.tensor(True), torch.tensor(False)


def mixture(**settings):
    torch.manual_seed(0)
    return Sorted().build(8, 8, routing(**settings))


def both(chosen, computed):
    """A load: as tokens chose, and as the experts compute."""
    return torch.tensor([chosen, computed])


def remembered(module):
    return {name: getattr(module, name).clone() for name in Memory._fields}


def outcome(applied=YES):
    return Outcome(torch.ones(()), applied, torch.zeros((), dtype=torch.int32), 0.0)


def test_a_bias_moves_against_the_load():
    module = mixture(balance="bias", bias_rate=0.25)
    load, passes = both([9.0, 3.0, 5.0, 3.0], [0.0, 0.0, 20.0, 0.0]), torch.tensor(2.0)         # the mean is 5
    module.after_update(load, passes, YES)
    assert module.bias.tolist() == [-0.25, 0.25, 0.0, 0.25]
    module.after_update(load, passes, NO)
    module.after_update(load.flip(1), passes, YES)
    assert module.bias.tolist() == [0.0, 0.25, 0.25, 0.0]
    assert module.num_updates == 0 and module.mean_load == 0


def test_the_mean_load_is_of_a_forward_pass_and_begins_with_the_first():
    """Of what is computed: by the choices of tokens without a target too."""
    module, few = mixture(balance="overflow", load_decay=0.75), [1.0, 0.0, 0.0, 0.0]
    load = both(few, [8.0, 0.0, 4.0, 4.0])                      # 16 choices in 4 passes, by 4 experts
    module.after_update(load, torch.tensor(4.0), NO)
    assert module.mean_load == 0 and module.num_updates == 0
    module.after_update(load, torch.tensor(4.0), YES)
    assert module.mean_load == 1 and module.num_updates == 1
    module.after_update(both(few, [0.0, 8.0, 4.0, 4.0]), torch.tensor(2.0), YES)
    assert module.mean_load == 0.75 * 1 + 0.25 * 2 and module.num_updates == 2
    assert not module.bias.any()


@pytest.mark.parametrize("decay", [0.0, 0.5])
def test_the_mean_load_remembers_where_passes_differ_in_length(decay):
    """Updates of 60 and of 20 tokens in turn, as rows sorted by length give: the limit of the next is of both."""
    module = mixture(balance="overflow", balance_ramp=0, threshold=2.5, load_decay=decay)
    with torch.no_grad():
        module.gate.weight.copy_(torch.eye(4, 8) * torch.tensor([[4.0], [3.0], [2.0], [1.0]]))
    for tokens in (60, 20):
        _, _, load = module(torch.ones(1, tokens, 8), None)
        module.after_update(load, torch.ones(()), YES)
    assert module.mean_load == (20 if decay else 10)
    _, _, load = module(torch.ones(1, 40, 8), None)             # 80 choices, of which two experts would have 40 each
    assert load[0].tolist() == [40, 40, 0, 0]
    assert load[1].max() == (40 if decay else 25)               # of 2.5 * 20 and 2.5 * 10 at most


def test_what_was_seen_of_an_update_is_forgotten_with_it():
    module = mixture(aux_loss=1.0, aux_scope="global_batch")
    for applied in (YES, NO):
        module.remember(torch.ones(4))
        module.remember(torch.full((4,), 2.0))
        assert module.load_so_far.tolist() == [2.0] * 4
        module.after_update(torch.ones(2, 4), torch.ones(()), applied)
        assert not module.load_so_far.any()


def test_it_stays_float32_and_where_it_was():
    module = mixture(balance="bias")
    module.bias.copy_(torch.tensor([0.1, 0.2, 0.3, 1 / 3]))
    before = remembered(module)
    for cast in (module.bfloat16, module.double):
        cast()
        assert all(torch.equal(value, before[name]) for name, value in remembered(module).items())
        assert module.bias.dtype == torch.float32
    assert module.gate.weight.dtype == torch.float64
    model = BF16Pure("float32", "float32").convert(tiny_model(routing=routing(balance="bias")))
    assert model.blocks[0].feed_forward.bias.dtype == torch.float32
    assert model.blocks[0].feed_forward.gate.weight.dtype == torch.bfloat16


def test_a_deep_copy_has_its_own():
    module = mixture(balance="bias")
    twin = copy.deepcopy(module)
    module.after_update(torch.arange(4.0).expand(2, 4), torch.ones(()), YES)
    assert module.bias.any() and not twin.bias.any()


def test_a_state_without_it_leaves_it_and_one_with_it_brings_it():
    """Snapshots from before there was any; and a run that goes on with another balance."""
    module, other = mixture(balance="bias"), mixture(balance="overflow")
    module.bias.fill_(0.5)
    state = module.state_dict()
    assert state.keys() & set(Memory._fields) == {"bias", "mean_load", "num_updates"}
    other.load_state_dict(state)
    assert torch.equal(other.bias, module.bias)
    old = {name: value for name, value in state.items() if name not in Memory._fields}
    other.load_state_dict(old)
    assert torch.equal(other.bias, module.bias) and old.keys() == state.keys() - set(Memory._fields)


# ---- through the model

HOWS = {"bias": {"balance": "bias", "bias_rate": 0.01}, "overflow": {"balance": "overflow", "balance_ramp": 0,
                                                                    "threshold": 1.1},
        "seen": {"aux_loss": 0.1, "aux_scope": "global_batch"}}


def of_model(model):
    return [remembered(block.feed_forward) for block in model.blocks]


def same(one, other):
    return all(torch.equal(mine[name], theirs[name]) for mine, theirs in zip(one, other, strict=True) for name in mine)


@pytest.mark.parametrize("how", HOWS.values(), ids=HOWS)
@pytest.mark.parametrize("checkpointing", [lambda model: model, Full(), Selective(1, ["matmul"])],
                         ids=["kept", "full", "selective"])
def test_it_changes_once_a_pass_and_once_an_update(how, checkpointing):
    """Twice the load of one micro-batch is that of two, whatever is computed again, and whatever is judged between."""
    model = checkpointing(tiny_model(routing=routing(**how)))
    terms = {}
    for seed in (0, 1):
        scaled, _, more = model(tiny_batch(seed=seed), torch.ones(()))
        before = of_model(model)
        scaled.backward()
        assert same(of_model(model), before)                # no recomputation changes it
        terms = {name: value + terms.get(name, 0) for name, value in more.items()}
        model.eval()
        model(tiny_batch(seed=9), torch.ones(()))
        model.logits(tiny_batch(seed=9))
        model.train()
        assert same(of_model(model), before)                # and no evaluation
    chosen = terms["expert_choices"]
    seen = torch.stack([block.feed_forward.load_so_far for block in model.blocks])
    assert torch.equal(seen, chosen if "aux_loss" in how else torch.zeros_like(seen))
    model.after_update(terms, outcome())
    for block, load in zip(model.blocks, chosen, strict=True):
        module = block.feed_forward
        assert not module.load_so_far.any()
        moved = how.get("bias_rate", 0.0) * (load.mean() - load).sign()
        assert torch.equal(module.bias, moved)
        assert module.mean_load == (load.mean() / 2 if how.get("balance") == "overflow" else 0)


@pytest.mark.parametrize(("how", "whole", "checkpointing"), [
    ("bias", False, Full()), ("seen", False, Selective(1, ["matmul"])), ("overflow", False, lambda model: model),
    ("overflow", True, Full()), ("seen", True, Full())])
def test_no_bit_changes_under_recomputation_and_compilation(how, whole, checkpointing):
    """In the second micro-batch of the second update, where all that is remembered has moved."""
    def train(model):
        for _ in range(2):
            torch.manual_seed(7)
            terms = {}
            for seed in (0, 1):
                found = one_pass(model, tiny_batch(seed=seed))
                _, _, more = model(tiny_batch(seed=seed), torch.ones(()))
                terms = {name: value + terms.get(name, 0) for name, value in more.items()}
            model.after_update(terms, outcome())
        return found

    torch._dynamo.reset()
    settings = routing(**{"aux_loss": 0.1, "z_loss": 0.1, "jitter": 0.1, "shared_hidden": 16, **HOWS[how]})
    model = checkpointing(tiny_model(layers=2, routing=settings))
    if whole:
        model.compute = torch.compile(model.compute, backend="aot_eager", fullgraph=True)
    else:
        for block in model.blocks:
            block.compile(backend="aot_eager", fullgraph=True)
    found, wanted = train(model), train(tiny_model(layers=2, routing=settings))
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_an_expert_of_a_frozen_gate_is_still_counted():
    model = tiny_model(routing=routing(balance="bias"))
    freeze(model, [])
    model(tiny_batch(), torch.ones(()))[0].backward()
    assert all(block.feed_forward.bias.grad is None and not block.feed_forward.bias.requires_grad
               for block in model.blocks)
