"""Documents that share a batch are computed as each alone: logits, loss and gradients.

Tolerance: float32 sums in another order. A gradient sums over 60 places and a product over at most 128 numbers; errors
add up like a random walk, so a norm is off by about sqrt(60 * 128) * eps / 2, twice (forward, backward): 1e-5.
"""

import json

import pytest
import torch
from conftest import train_here
from decoders import SMALL, parts
from tiny import one_pass

from forge.attention.cudnn import CuDNN
from forge.attention.eager import Eager
from forge.attention.eager_stored import EagerStored
from forge.attention.flash import Flash
from forge.attention.flex import Flex
from forge.attention.sdpa import SDPA
from forge.batch import IGNORED, Batch
from forge.batching.bucketed import Bucketed
from forge.batching.packed import Packed

ATTENTIONS = [Eager(), EagerStored(), SDPA(), Flash(), CuDNN(), Flex()]
CLOSE = 1e-5
OPTIONS = {"packed": Packed(24, 100), "bucketed": Bucketed(24, [4, 8, 12])}


class Texts:
    """Documents of random tokens, as many as a small model knows."""

    fingerprint = ""
    lengths = torch.tensor([6, 10, 2, 17, 25, 4, 4]).numpy()

    def __len__(self):
        return len(self.lengths)

    def __getitem__(self, index):
        return {"tokens": torch.randint(61, (self.lengths[index],), generator=torch.Generator().manual_seed(index))}


def batches(option):
    rows = [row for batch in option.plan(Texts(), 0, 0, 4) for row in batch]
    if option is OPTIONS["packed"]:
        assert max(map(len, rows)) > 1
        return [with_count(option.collate(rows, Texts()))]
    return [with_count(option.collate(list(batch), Texts())) for batch in option.plan(Texts(), 0, 0, 4)]


def with_count(tensors):
    return Batch(tensors, int((tensors["targets"] != IGNORED).sum()), 0)


def alone():
    for index in range(len(Texts())):
        tokens = Texts()[index]["tokens"].unsqueeze(0)
        yield Batch({"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}, tokens.shape[1] - 1, 0)


def summed(network, some):
    """Loss and gradients of batches, each target weighing the same."""
    total = {}
    for batch in some:
        for name, value in one_pass(network, batch).items():
            weight = 1 if name == "loss_sum" else batch.num_targets
            total[name] = total.get(name, 0) + weight * value
    return total


@pytest.mark.parametrize("attention", ATTENTIONS, ids=lambda option: type(option).__name__)
@pytest.mark.parametrize("name", ["gpt2", "llama", "mixtral_window", "deepseek_v3"])
@pytest.mark.parametrize("batching", OPTIONS)
def test_loss_and_gradients_are_those_of_each_alone(name, attention, batching):
    torch.manual_seed(0)
    network = SMALL[name].build(parts(attention=attention))
    together, apart = summed(network, batches(OPTIONS[batching])), summed(network, alone())
    assert together.keys() == apart.keys()
    for parameter, value in apart.items():
        assert (together[parameter] - value).norm() <= CLOSE * max(value.norm(), 1e-3), parameter


@pytest.mark.parametrize("attention", ATTENTIONS, ids=lambda option: type(option).__name__)
def test_a_changed_document_moves_no_bit_of_the_others(attention):
    torch.manual_seed(0)
    network = SMALL["llama"].build(parts(attention=attention))
    (batch,) = batches(OPTIONS["packed"])
    row = next(row for row in range(4) if batch.tensors["documents"][row].max() > 1)
    before = network.logits(batch)
    changed = batch.tensors["documents"][row] == 0
    batch.tensors["tokens"][row, changed] += 1
    after = network.logits(batch)
    assert torch.equal(before[row, ~changed], after[row, ~changed])
    assert (before[row, changed] != after[row, changed]).any(-1).all()


@pytest.mark.parametrize("batching", OPTIONS)
def test_a_batch_of_empty_rows_has_no_loss_and_gradients_of_zero(batching):
    """What a rank is given where an update has fewer documents than ranks."""
    network = SMALL["mixtral_window"].build(parts())
    empty = with_count(OPTIONS[batching].collate([(), ()], Texts()))
    scaled, loss_sum, _ = network(empty, torch.tensor(1.0))
    scaled.backward()
    assert loss_sum == 0 and all((weight.grad == 0).all() for weight in network.parameters() if weight.grad is not None)


@pytest.mark.parametrize("batching", ["batching=packed", "batching=bucketed"])
def test_accumulation_changes_nothing(batching, shards, tmp_path):
    """Micro-batches of other shapes, with other numbers of targets and, in the last update of a bucket, none."""
    line = [*shards, batching, "sequence_length=96", "steps=4", "batching.edges=[24,48]"][:5 + ("buck" in batching)]
    whole = train_here(tmp_path / "whole", *line, "micro_batch=null", "model.routing.aux_loss=0")
    cut = train_here(tmp_path / "cut", *line, "micro_batch=2", "model.routing.aux_loss=0")
    assert whole.code == cut.code == 0, whole.err + cut.err
    for step, loss in whole.losses.items():
        assert cut.losses[step] == pytest.approx(loss, rel=step * CLOSE)
    assert [r["targets"] for r in whole.records] == [r["targets"] for r in cut.records]
    assert json.loads((tmp_path / "cut/result.json").read_text())["tokens"] == sum(r["targets"] for r in cut.records)
