"""A whole training of a side from given weights: its curve, and how good the model is at the end."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from forge.agreement import total
from forge.build import build
from forge.config import Config
from forge.errors import ConfigError
from forge.evaluation.none import NoEvaluation
from forge.observe.evaluate import Judge, as_in_evaluation
from forge.snapshot.none import NoSnapshot
from forge.tracker import Trackers
from forge.verify.gradients_of import Weights, start_from

if TYPE_CHECKING:
    from forge.hardware import Topology
    from forge.verify.job import Job


def measure_training(config: Config, job: Job, topology: Topology, out: Path) -> dict[str, Any]:
    """Returns "losses": of each step, nats a target; "heldout_loss" and "accuracy": of the next token, on the held-out
    text. Or "foreign": see measure_gradients."""
    config = replace(config, seed=job.seed, steps=job.steps, stop_at=None, evaluation=NoEvaluation(),
                     snapshot=NoSnapshot(), tracker=Trackers(1, {}), resume=None)
    with build(config, topology, out) as (trainer, run):
        foreign = start_from(run.model, Path(job.weights), topology)
        if foreign:
            return {"foreign": foreign}
        Weights(run.model, Path(job.weights)).as_given()
        if job.nudge:
            nudge(run.model, job.seed)
        losses = [total(step.terms["loss_sum"].double(), topology) / step.targets for step in trainer.steps(job.steps)]
        judge = Judge.of(config, run.topology, "heldout")
        heldout, targets = judge.mean_loss(run.model, job.batches)
        if not targets:
            raise ConfigError("There is no held-out text to judge by: set data.heldout.")
        return {"losses": torch.stack(losses).tolist(), "heldout_loss": heldout, "targets": targets,
                "accuracy": accuracy(judge, run.model, job.batches)}


def nudge(model: nn.Module, seed: int) -> None:
    """Each weight up or down by one unit of its last place: what a change of nothing but rounding does to a run."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            up = torch.randint(0, 2, weight.shape, generator=generator).to(weight)
            weight.mul_(1 + (2 * up - 1) * torch.finfo(weight.dtype).eps)


def accuracy(judge: Judge, model: nn.Module, batches: int) -> float:
    """The share of held-out targets that the model holds most likely, over at most so many batches of every rank."""
    device = judge.topology.device
    counts = torch.zeros(2, dtype=torch.float64, device=device)
    with as_in_evaluation(model):
        for batch in judge.batches(batches):
            _, missed = judge.by_target(model, batch)
            counts[0] += (1 - missed).sum()
            counts[1] += len(missed)
    right, all_targets = total(counts, judge.topology).tolist()
    return float(right / max(all_targets, 1.0))
