"""The parts of expert parallelism on ranks of gloo, in float64, against the same in one process."""

from types import SimpleNamespace

import pytest
import torch
from ranks import SECONDS, at_ranks
from routings import routing
from tiny import tiny_batch, tiny_model

from forge.batch import IGNORED, Batch
from forge.comm.ddp import DDP
from forge.errors import UnusableEnvironment
from forge.hardware import Topology
from forge.moe_router.experts import by_sorting, loop
from forge.moe_router.mixture import Mixture
from forge.optimizer.update import GradientUpdate
from forge.parallel.exchange import Exchange, Trip
from forge.parallel.expert import ExpertParallel
from forge.parallel.spread import gathered, spread_in
from forge.snapshot.store import write_snapshot
from forge.snapshot.tensors import Entry, entries, read_tensors, write_tensors
from forge.state import RunState

pytestmark = pytest.mark.dist
ROUTING = routing(normalize=True, aux_loss=0.01, aux_scope="sequence", z_loss=0.001, balance="bias", shared_hidden=24)
PRECISION = SimpleNamespace(parameter="float64", reduce="float64", master=None, loss_scale=None)
NEAR = {"rtol": 0, "atol": 1e-13}       # float64: 450 roundings of numbers near 1, whatever the order of the sums


def model_in_float64():
    """In its last layer no token goes to the experts of the second half: their rank gets no row."""
    model = tiny_model(layers=2, routing=ROUTING).double()
    last = [module for module in model.modules() if isinstance(module, Mixture)][-1]
    last.bias[2:] = -100
    return model


def rows(take: slice) -> Batch:
    """Of eight rows, padded by as many tokens as their number."""
    batch = tiny_batch(rows=8)
    for row, targets in enumerate(batch.tensors["targets"]):
        targets[:row] = IGNORED
    tensors = {name: tensor[take] for name, tensor in batch.tensors.items()}
    return Batch(tensors, int((tensors["targets"] != IGNORED).sum()), 0)


ALL = slice(None)


def one_update(size: int):
    """(gradients, loss, gradient norm, what became of an update after a gradient was infinite) on each rank."""
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    mesh = ExpertParallel(size).mesh("cpu", world)
    topology = Topology(torch.device("cpu"), rank, rank, world, mesh)
    model = ExpertParallel(size).shard(model_in_float64(), mesh)
    sync = DDP(25, True, False).build(model, topology, PRECISION)
    scale, losses = torch.tensor(topology.data_size / rows(ALL).num_targets), []
    for turn in range(2):
        with sync.micro(last=turn == 1):
            scaled, loss_sum, _ = sync.model(rows(slice(topology.data_rank + turn * world, None, 2 * world)), scale)
            scaled.backward()
            losses.append(loss_sum)
    sync.finish(0)
    loss = torch.stack(losses).sum()
    torch.distributed.all_reduce(loss)
    gradients = {name: gathered(weight, weight.grad).clone() for name, weight in model.named_parameters()}
    return gradients, loss, *skipped_update(model, rank)


def skipped_update(model, rank):
    parameters = dict(model.named_parameters())
    groups = [{"params": [*parameters.values()], "names": [*parameters], "lr_scale": 1.0}]

    def update():
        return GradientUpdate(torch.optim.AdamW(groups, lr=0.1), 0.1, 1.0, lambda step, steps: 1.0, 9, PRECISION)

    kept = {name: weight.grad.clone() for name, weight in parameters.items()}
    norm = update()().norm
    for name, weight in parameters.items():
        weight.grad = kept[name]
    if rank % 2:            # both ranks that hold the expert, as its gradient is one sum
        parameters["blocks.0.feed_forward.down"].grad[0, 0, 0] = torch.inf
    before = parameters["head.weight"].clone()
    applied = update()().applied
    return norm, bool(applied), torch.equal(before, parameters["head.weight"])


@pytest.mark.parametrize(("world", "size"), [(2, 2), (4, 2)])
def test_gradients_norm_and_skipping(world, size):
    model = model_in_float64()
    scaled, loss, _ = model(rows(ALL), torch.tensor(1 / rows(ALL).num_targets))
    scaled.backward()
    wanted = {name: weight.grad for name, weight in model.named_parameters()}
    norm = torch.stack([grad.norm() for grad in wanted.values()]).norm()
    results = at_ranks(world, one_update, size)
    torch.testing.assert_close(results[0][0], wanted, **NEAR)
    assert wanted["blocks.1.feed_forward.down"][2:].abs().max() == 0, "experts without a token"
    for _, found, own_norm, applied, unmoved in results:
        assert float(found) == pytest.approx(float(loss), rel=1e-12)
        assert float(own_norm) == pytest.approx(float(norm), rel=1e-6) and own_norm == results[0][2], "to the last bit"
        assert not applied and unmoved, "an infinite gradient of one expert"


def far_and_near(execute):
    """Differences of an Exchange from the same experts at home, where rank r has 5 r tokens, some choices dropped."""
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    generator = torch.Generator().manual_seed(7)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    gate_up, down = normal(6, 8, 4).requires_grad_(), normal(6, 4, 4).requires_grad_()
    tokens, weights = normal(5, 4).repeat(rank, 1).requires_grad_(), normal(5, 2).repeat(rank, 1).requires_grad_()
    experts = torch.tensor([[0, 5], [1, 6], [6, 6], [5, 4], [0, 1]]).repeat(rank, 1)       # 6: dropped; nobody has 2, 3
    with torch.no_grad():
        weights[experts == 6] = float("nan")                # what a dropped choice weighs reaches nothing
    here = slice(rank * 6 // world, (rank + 1) * 6 // world)
    leaves = (tokens, weights, gate_up, down)

    def both(function, mine):
        y = function(tokens, experts, weights, gate_up[mine], down[mine])
        grads = list(torch.autograd.grad(y.sin().sum(), leaves))
        grads[1] = grads[1].masked_fill(experts == 6, 0)
        return [y, *grads]

    near = both(by_sorting, slice(None))
    far = both(lambda *given: Exchange(torch.distributed.group.WORLD)(execute, *given)(), here)
    for grads in (near, far):
        for summed in grads[3:]:
            torch.distributed.all_reduce(summed)
    return [float((a - b).abs().max()) if a.numel() else 0.0 for a, b in zip(near, far, strict=True)]


@pytest.mark.parametrize("execute", [loop, by_sorting])
def test_experts_elsewhere_are_the_experts_at_home(execute):
    for differences in at_ranks(3, far_and_near, execute):
        assert max(differences) < 1e-12


def timeouts():
    mesh = ExpertParallel(2).mesh("cpu", 4)
    return [group._get_backend(torch.device("cpu")).options._timeout.total_seconds() for group in mesh.get_all_groups()]


def test_groups_wait_as_long_as_all_ranks_do():
    assert at_ranks(4, timeouts) == [[SECONDS, SECONDS]] * 4


def order_of_events():
    """What happens in forward and backward of one mixture, on this rank."""
    events = []
    torch.manual_seed(0)
    mesh = ExpertParallel(2).mesh("cpu", 2)
    mixture = ExpertParallel(2).shard(Mixture(8, 8, ROUTING, by_sorting), mesh)

    def noting(name, own):
        def noted(trip, *arguments):
            events.append(name)
            return own(trip, *arguments)

        return noted

    Trip._start, Trip.wait = noting("start", Trip._start), noting("wait", Trip.wait)
    mixture.shared.register_forward_hook(lambda *_: events.append("shared"))
    mixture.shared.down.register_full_backward_hook(lambda *_: events.append("shared"))
    y, _, _ = mixture(torch.randn(1, 5, 8, requires_grad=True), torch.ones(1, 5, dtype=torch.bool))
    forward = list(events)
    events.clear()
    y.sum().backward()
    return forward, events


def test_the_shared_expert_is_computed_while_tokens_travel():
    for forward, backward in at_ranks(2, order_of_events):
        assert forward == ["start", "shared", "wait", "start", "wait"]
        assert backward == ["start", "wait", "start", "shared", "wait"]


def saved(run_dir, fails):
    """The error of a snapshot whose first rank cannot write, while the other sends more than sockets hold; or, where
    it can, this rank's parameters, and what it reads."""
    rank = torch.distributed.get_rank()
    mesh = ExpertParallel(2).mesh("cpu", 2)
    model = ExpertParallel(2).shard(Mixture(256, 1024 if fails else 8, ROUTING, by_sorting), mesh)
    topology = Topology(torch.device("cpu"), rank, rank, 2, mesh)
    if fails:
        def full(file, listed, wholes, metadata):
            next(wholes)
            raise OSError(28, "No space left on device")

        import forge.snapshot.store
        forge.snapshot.store.write_tensors = full
    try:
        write_snapshot(run_dir, RunState({"model": model, "again": model}, {}, spread_in(model)), 1, {}, topology)
    except UnusableEnvironment as error:
        return str(error)
    return {name: weight.detach() for name, weight in model.named_parameters()}, \
        read_tensors(run_dir / "snapshots/step_00000001/again.safetensors", spread_in(model))[1]


def test_a_full_disk_ends_all_ranks(tmp_path):
    first, second = at_ranks(2, saved, tmp_path, True)
    assert "No space left" in first and "another rank" in second
    assert not list((tmp_path / "snapshots").glob("*"))


def test_a_rank_reads_its_own_slice(tmp_path):
    for mine, read in at_ranks(2, saved, tmp_path, False):
        for name, weight in mine.items():
            assert torch.equal(read[name], weight), name


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool])
def test_files_are_those_of_safetensors(dtype, tmp_path):
    from safetensors.torch import load_file

    values = {"b": torch.arange(7).to(dtype), "a": torch.ones(2, 0, dtype=dtype), "c": torch.tensor(1.0).to(dtype),
              "odd": torch.ones(3, dtype=torch.uint8), "step": 3}
    listed = entries(values, {})
    write_tensors(tmp_path / "file", listed, (entry.whole() for entry in listed), {"values": "{}"})
    found = load_file(tmp_path / "file")
    assert found.keys() == values.keys() - {"step"}
    assert all(torch.equal(found[name], values[name]) and found[name].dtype == values[name].dtype for name in found)
    metadata, read = read_tensors(tmp_path / "file", {})
    assert metadata == {"values": "{}"} and all(torch.equal(read[name], found[name]) for name in found)


def test_one_whole_tensor_at_a_time(tmp_path):
    import weakref

    alive = []

    def wholes():
        for _ in range(3):
            assert not [whole for whole in alive if whole() is not None], "the one before is still in memory"
            whole = torch.ones(4)
            alive.append(weakref.ref(whole))
            yield whole
            del whole

    write_tensors(tmp_path / "file", [Entry(str(index), torch.ones(4), None) for index in range(3)], wholes(), {})
    assert len(alive) == 3
