"""Checkpointing changes memory and time, and no bit of the result."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch
from tiny import ROUTING, one_pass, tiny_batch, tiny_model
from torch._dynamo.testing import CompileCounterWithBackend
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from forge.attention.eager import Eager
from forge.attention.flash import Flash
from forge.checkpointing.full import Full
from forge.checkpointing.none import KeepAll
from forge.checkpointing.selective import Selective

OPTIONS = {
    "full": Full(), "selective, nothing kept": Selective(1, []), "every other block": Selective(2, []),
    "products": Selective(1, ["matmul"]), "attention": Selective(1, ["attention"]),
    "products and attention": Selective(1, ["matmul", "attention"]), "both in every third": Selective(3, ["matmul"])}


def equal(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("routing", [None, ROUTING], ids=["dense", "experts"])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("name", OPTIONS)
def test_no_bit_changes(name, dropout, routing):
    batch = tiny_batch()
    wanted = one_pass(KeepAll()(tiny_model(dropout=dropout, routing=routing)), batch)
    found = one_pass(OPTIONS[name](tiny_model(dropout=dropout, routing=routing)), batch)
    assert equal(found, wanted)


@pytest.mark.parametrize("attention", [Eager(), Flash()])
def test_no_bit_changes_for_other_attention(attention):
    wanted = one_pass(tiny_model(attention=attention), tiny_batch())
    assert equal(one_pass(OPTIONS["products and attention"](tiny_model(attention=attention)), tiny_batch()), wanted)


@pytest.mark.parametrize("name", OPTIONS)
def test_no_bit_changes_under_autocast(name):
    def halved(model):
        with torch.autocast("cpu", torch.bfloat16):
            scaled, loss_sum, _ = model(tiny_batch(), torch.tensor(0.01))
        scaled.backward()
        return {"loss_sum": loss_sum, **{name: parameter.grad for name, parameter in model.named_parameters()}}

    assert equal(halved(OPTIONS[name](tiny_model())), halved(tiny_model()))


class Operators(TorchDispatchMode):
    """Counts operators by name, and knows which results are still alive."""

    def __init__(self):
        super().__init__()
        self.counts, self.results = {}, {}

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        out = operator(*args, **(kwargs or {}))
        name = operator.name().split("::")[1]
        self.counts[name] = self.counts.get(name, 0) + 1
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                self.results[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        return out

    def bytes_alive(self):
        return sum(size for storage, size in self.results.values() if not storage.expired())


def cost(option):
    """Bytes kept between forward and backward, and the operators that ran in backward."""
    model, batch = option(tiny_model(layers=6, attention=Flash())), tiny_batch(rows=4, length=64)
    with Operators() as forward:
        scaled, _, _ = model(batch, torch.tensor(1.0))
    kept = forward.bytes_alive()
    with Operators() as backward:
        scaled.backward()
    return kept, backward.counts


def test_memory_shrinks_in_the_order_of_what_is_kept():
    kept = {name: cost(OPTIONS[name])[0] for name in OPTIONS}
    assert kept["full"] == kept["selective, nothing kept"]
    assert kept["full"] < kept["attention"] < kept["products and attention"] < cost(KeepAll())[0]
    assert kept["full"] < kept["products"] < kept["products and attention"]
    assert kept["full"] < kept["every other block"] < cost(KeepAll())[0]
    assert kept["full"] < 0.5 * cost(KeepAll())[0]


def test_saved_tensors_shrink_to_the_inputs_of_blocks():
    def num_saved(option):
        model, saved = option(tiny_model(layers=6)), []
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(0) or tensor, lambda tensor: tensor):
            model(tiny_batch(), torch.tensor(1.0))
        return len(saved)

    outside = num_saved(Full())             # embedding, last norm and loss
    each = (num_saved(KeepAll()) - outside) / 6
    assert each > 10
    assert num_saved(Selective(2, [])) == outside + 3 * each
    assert num_saved(Selective(4, [])) == outside + 4 * each


@pytest.mark.parametrize(("name", "products", "attention"), [
    ("full", True, True), ("products", False, True), ("attention", True, False),
    ("products and attention", False, False)])
def test_what_is_kept_is_not_computed_again(name, products, attention):
    _, plain = cost(KeepAll())
    _, counts = cost(OPTIONS[name])
    assert (counts["mm"] > plain["mm"]) == products
    assert ("_scaled_dot_product_flash_attention_for_cpu" in counts) == attention


def test_names_stay_and_a_deep_copy_is_bound_to_itself():
    model = Full()(tiny_model())
    assert model.state_dict().keys() == tiny_model().state_dict().keys()
    before = one_pass(model, tiny_batch())
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert equal(one_pass(twin, tiny_batch()), before)


@pytest.mark.parametrize("whole", [False, True], ids=["blocks", "whole"])
@pytest.mark.parametrize("name", ["full", "products and attention"])
def test_compiled_once_for_all_blocks(name, whole):
    """More blocks than torch.compile is willing to compile one by one; a graph of the same operators, so no bit
    changes here either."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    layers = 3 if whole else 10
    model = OPTIONS[name](tiny_model(layers=layers))
    if whole:
        model.compute = torch.compile(model.compute, backend=counter, fullgraph=True)
    else:
        for block in model.blocks:
            block.compile(backend=counter, fullgraph=True)
    for seed in (1, 0):
        found = one_pass(model, tiny_batch(seed=seed))
    assert equal(found, one_pass(tiny_model(layers=layers), tiny_batch()))
    assert counter.frame_count == 1


def test_every_must_be_positive():
    (problem,) = Selective(0, []).problems(SimpleNamespace())
    assert problem.startswith("checkpointing.every=0")
    assert list(Selective(1, []).problems(SimpleNamespace())) == []
