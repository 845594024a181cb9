"""Wire the parts, in one visible order. The order of the model's wrappers is decided here and nowhere else."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from forge.agreement import Agreement, total
from forge.batch import Batch, Cursor
from forge.comm import Sync
from forge.comm.sync import Alone
from forge.config import Config
from forge.errors import ConfigError
from forge.feed import Feed
from forge.hardware import Topology
from forge.model import Parts
from forge.observe.drops import Drops
from forge.observe.ledger import Ledger, drop_after
from forge.observe.nonfinite import origin_of
from forge.observe.phases import Phases
from forge.observe.seen import Seen
from forge.optimizer import Update
from forge.optimizer.groups import freeze
from forge.parallel.spread import spread_in
from forge.passes.turns import Turns
from forge.run import Run
from forge.snapshot.store import read_snapshot
from forge.state import Progress, Rng, RunState
from forge.trainer import Trainer, scale_of


def build_model(config: Config, topology: Topology) -> nn.Module:
    """The model as it is trained, without what joins the ranks: also what evaluation and sampling use."""
    torch.manual_seed(config.seed)                              # the same weights on every rank
    with torch.device(topology.device):
        bare = config.model.build(Parts(config.attention, config.operators, config.moe_router, config.loss))
    bare = config.parallel.shard(config.precision.convert(bare), topology.mesh)
    freeze(bare, config.optimizer.groups)
    return config.compile(config.checkpointing(bare))


def build_feed(config: Config, topology: Topology) -> Feed:
    """What this rank trains on."""
    return Feed(config.data.open("train"), config.batching, config.seed, config.global_batch,
                config.rows_per_pass(topology.data_size), topology.data_rank, topology.data_size, config.augment.read)


@contextmanager
def build(config: Config, topology: Topology, run_dir: Path) -> Iterator[tuple[Trainer, Run]]:
    """A trainer at the position where the run starts or goes on, and what observes it. Raises ForgeError."""
    topology = replace(topology, mesh=config.parallel.mesh(topology.device.type, topology.world_size))
    for problem in config.share_problems(topology.data_size):      # config.py knew the ranks of one machine only
        raise ConfigError(problem)
    torch.use_deterministic_algorithms(config.reproducible)
    phases, progress = Phases(topology.device), Progress()
    seen = Seen(getattr(config.model, "window", None))
    stage = partial(_staged, config, topology)
    feed = build_feed(config, topology)
    drops = Drops(getattr(feed.source, "dropped", None), config.tracker.every, topology)
    model = build_model(config, topology)
    sync: Sync = config.comm.build(model, topology, config.precision)
    update = config.optimizer.build(model, config.schedule, config.steps, config.precision)
    passes = config.passes.build(sync, config.precision, topology.device, phases)
    _prepare(config, sync, feed, stage, topology)

    ledger = Ledger(run_dir / "metrics.jsonl", config.tracker.every, config.optimizer.max_skipped, topology, phases,
                    partial(origin_of, model, _again(config, feed, stage, model, sync, update, progress, topology),
                            topology), seen)
    state = RunState({"model": model, "update": update, "comm": sync, "progress": progress, "figures": ledger},
                     {"rng": Rng()}, spread_in(model), {"dropped": drops} if drops.dropped is not None else {})
    identity = _identity(config, feed)
    run = Run(config, run_dir, topology, model, state, progress, phases, ledger, seen, identity)
    _resume(run)
    with ExitStack() as opened:
        reader = config.dataloader.build(feed, topology)
        opened.callback(reader.close)
        reader.seek(progress.cursor)
        works = drops.counted(config.overlap(reader, lambda batch: stage(seen(batch)), phases))
        _observe(run, drops, opened)
        trainable: Any = model
        yield Trainer(works, passes, sync, update, trainable.after_update, progress, Agreement(topology), phases,
                      topology.data_size), run


def _staged(config: Config, topology: Topology, batch: Batch) -> Batch:
    return config.augment(batch.to(topology.device))


def _resume(run: Run) -> None:
    """Go on where the snapshot that the line names was made."""
    if run.config.resume:
        read_snapshot(Path(run.config.resume), run.state, run.identity, run.topology)
        if run.topology.is_first:
            drop_after(run.ledger.path, run.progress.step)


def _observe(run: Run, drops: Drops, opened: ExitStack) -> None:
    """What watches the run, in the order in which it is told of each step."""
    run.observers.extend([run.ledger, run.config.snapshot.build(run), run.config.evaluation.build(run),
                          drops])
    for tracker in run.config.tracker.options.values() if run.topology.is_first else ():
        sink = tracker.build(run)
        opened.callback(sink.close)
        run.ledger.sinks.append(sink)


def _prepare(config: Config, sync: Sync, feed: Feed, stage: Callable[[Batch], Batch], topology: Topology) -> None:
    """Let comm see one backward before the first that counts, if it wants to."""
    def rehearse() -> None:
        before = {name: buffer.clone() for name, buffer in sync.model.named_buffers()}
        passes = config.passes.build(sync, config.precision, topology.device, lambda phase: None)
        passes(map(stage, feed[Cursor()].batches), torch.zeros((), device=topology.device))
        sync.model.zero_grad(set_to_none=True)
        for name, buffer in sync.model.named_buffers():
            buffer.copy_(before[name])                          # what the model remembers is of training

    sync.prepare(rehearse)


def _again(config: Config, feed: Feed, stage: Callable[[Batch], Batch], model: nn.Module, sync: Sync, update: Update,
           progress: Progress, topology: Topology) -> Callable[[int], None]:
    """Takes the passes of a past update once more, with the weights of now. Gradients of ranks do not meet."""
    turns = Turns(Alone(model), config.precision, topology.device, lambda phase: None)

    def again(step: int) -> None:
        cursor = progress.cursor
        for _ in range(progress.step - step + 1):
            cursor = feed.before(cursor)
        work = feed[cursor]
        targets = total(torch.full((), float(work.num_targets), device=topology.device), topology)
        with sync.micro(last=False):
            turns(map(stage, work.batches), scale_of(update, targets, topology.data_size))

    return again


def _identity(config: Config, feed: Feed) -> dict[str, Any]:
    """What a position in the data means: with any of these changed, the same cursor points elsewhere."""
    return {"data": feed.source.fingerprint, "batching": dict(vars(config.batching)), "seed": config.seed,
            "global_batch": config.global_batch, "sequence_length": config.sequence_length}
