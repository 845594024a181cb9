"""Ranks of gloo of which one has no picture, in float64, against all rows in one process."""

from types import SimpleNamespace

import pytest
import torch
from decoders import parts
from pictures import batch_of, small
from ranks import at_ranks

from forge.batch import IGNORED, Batch
from forge.comm.ddp import DDP
from forge.hardware import Topology

pytestmark = pytest.mark.dist
PRECISION = SimpleNamespace(parameter="float64", reduce="float64", master=None, loss_scale=None)
NEAR = {"rtol": 0, "atol": 1e-13}       # float64: 450 roundings of numbers near 1, whatever the order of the sums


def model():
    torch.manual_seed(0)
    return small().build(parts()).double()


def rows(take: slice) -> Batch:
    """Of two rows: one with two pictures, one of text."""
    whole = batch_of(small(), per_row=(2, 0))
    tensors = {name: whole.tensors[name][take] for name in ("tokens", "targets")}
    pictures = whole.tensors["pictures"].double() if take.start == 0 else torch.zeros(0, 3, 8, 8, dtype=torch.float64)
    return Batch(tensors | {"pictures": pictures}, int((tensors["targets"] != IGNORED).sum()), 0)


def one_pass():
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    network = model()
    sync = DDP(25, True, False).build(network, Topology(torch.device("cpu"), rank, rank, world, None), PRECISION)
    with sync.micro(last=True):
        sync.model(rows(slice(rank, rank + 1)), torch.tensor(world / rows(slice(0, 2)).num_targets))[0].backward()
    sync.finish(1)
    return {name: parameter.grad.numpy() for name, parameter in network.named_parameters()}


def test_a_rank_without_pictures_takes_part():
    whole, network = rows(slice(0, 2)), model()
    network(whole, torch.tensor(1 / whole.num_targets))[0].backward()
    first, second = at_ranks(2, one_pass)
    for name, parameter in network.named_parameters():
        assert parameter.grad.any(), name
        for found in (first, second):
            torch.testing.assert_close(torch.from_numpy(found[name]), parameter.grad, **NEAR)
