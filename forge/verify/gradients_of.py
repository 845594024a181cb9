"""The gradients of a run's first updates, from given weights, as its own loop makes them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from forge.agreement import all_agree, total
from forge.build import build
from forge.config import Config, option_of
from forge.evaluation.none import NoEvaluation
from forge.optimizer import Outcome
from forge.parallel.spread import gathered, mine_of, whole_shape
from forge.precision import Precision
from forge.precision.fp32 import FP32
from forge.snapshot.none import NoSnapshot
from forge.tracker import Trackers
from forge.verify.called import watched
from forge.verify.float64 import Float64
from forge.verify.plain import plain_options
from forge.verify.trace import Trace
from forge.verify.uneven import Uneven

if TYPE_CHECKING:
    from forge.hardware import Topology
    from forge.optimizer import Update
    from forge.verify.job import Job


def measure_gradients(config: Config, job: Job, topology: Topology, out: Path) -> dict[str, Any]:
    """Leaves update_<n>.safetensors: every gradient by name, without the loss scale.

    Returns "updates": the loss, terms and targets of each, "modules": see Trace, and "calls": see watched. Where the
    weights of the other side do not fit this model, only "foreign": in what they differ.
    """
    config, calls = watched(adjusted(config, job), job.watch)
    with build(config, topology, out) as (trainer, run):
        foreign = start_from(run.model, Path(job.weights), topology)
        if foreign:
            return {"foreign": foreign}
        weights = Weights(run.model, Path(job.weights))
        trainer.update = Captured(trainer.update, run.model, weights, out if topology.is_first else None)
        weights.put(0)
        updates = []
        with Trace.of(run.model, job.trace) as trace:
            for step in trainer.steps(job.updates):
                sums = {name: total(_wide(value), topology) for name, value in step.terms.items()}
                updates.append({"targets": float(step.targets), "tied": weights.tied(step.number - 1),
                                **_figures(sums, float(step.targets))})
        order = [name for name, _ in run.model.named_parameters()]
    return {"updates": updates, "modules": trace.seen, "compute": config.precision.compute, "order": order,
            "calls": calls}


def adjusted(config: Config, job: Job) -> Config:
    """The configuration with the job's rows, number format and plain options, and nobody who looks on."""
    made: dict[str, Callable[[], Any]] = {
        "own": lambda: config.precision, "float32": FP32, "float64": Float64,
        "given": lambda: option_of("precision", Precision, job.given, tuple(job.allowed))}
    return replace(config, precision=made[job.precision](), global_batch=job.rows, micro_batch=job.micro_batch,
                   batching=Uneven(config.batching), evaluation=NoEvaluation(), snapshot=NoSnapshot(),
                   tracker=Trackers(1, {}), resume=None, **plain_options(job.plain))


def start_from(model: nn.Module, path: Path, topology: Topology) -> list[str]:
    """Write the weights that all sides start from, where nobody has; or say in what this model's differ from them.
    All ranks call it."""
    own = dict(model.named_parameters())
    if not all_agree(not topology.is_first or path.exists(), topology):     # every rank has drawn the same
        drawn = {name: gathered(weight, weight).float().contiguous() for name, weight in own.items()}
        if topology.is_first:
            partial = path.with_suffix(".partial")
            save_file(drawn, partial)
            partial.replace(path)
        all_agree(True, topology)                   # the file is there
    with safe_open(path, "pt") as file:
        theirs = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}     # noqa: SIM118
    odd = [f"{name} is the baseline's alone" for name in theirs.keys() - own.keys()]
    odd += [f"{name} is the candidate's alone" for name in own.keys() - theirs.keys()]
    odd += [f"{name} is {list(theirs[name])} in the baseline and {list(whole_shape(own[name]))} in the candidate"
            for name in own.keys() & theirs.keys() if theirs[name] != tuple(whole_shape(own[name]))]
    return sorted(odd)


@dataclass(frozen=True)
class Weights:
    """What each update starts from, counted from 0. The even ones: the given weights, with small matrices enlarged
    until they keep the size of what passes through them (a first 0.02 in a narrow model leaves activations so small
    that curves look straight). The odd ones: the given weights, with gates of zero, whose experts all tie."""

    model: nn.Module
    path: Path

    def as_given(self) -> None:
        with torch.no_grad(), safe_open(self.path, "pt") as file:
            for name, weight in self.model.named_parameters():
                weight.copy_(mine_of(weight, file.get_tensor(name)))

    def put(self, update: int) -> None:
        gates = self._gates() if self.tied(update) else set()
        with torch.no_grad(), safe_open(self.path, "pt") as file:
            for name, weight in self.model.named_parameters():
                given = file.get_tensor(name)
                value = given * 0 if name in gates else given if update % 2 else enlarged(given)
                weight.copy_(mine_of(weight, value))

    def tied(self, update: int) -> bool:
        return bool(update % 2 and self._gates())

    def _gates(self) -> set[str]:
        """The gates of mixtures of experts: see forge.moe_router.MoERouter."""
        names = {name for name, _ in self.model.named_parameters()}
        return {name for name in names if name.endswith("gate.weight")
                and name.removesuffix("gate.weight") + "gate_up" in names}


def enlarged(weight: Tensor) -> Tensor:
    """A matrix [..., out, in] whose root mean square is 1 / sqrt(in) at least; vectors as they are."""
    if weight.dim() < 2:
        return weight
    size = float(weight.double().square().mean().sqrt()) * weight.shape[-1] ** 0.5
    return weight / size if 0 < size < 1 else weight


@dataclass
class Captured:
    """In the place of the run's own update: keeps the gradients, and puts the weights of the next update in place.

    out: None on ranks that write nothing.
    """

    own: Update
    model: nn.Module
    weights: Weights
    out: Path | None
    done: int = field(default=0)

    def __post_init__(self) -> None:
        self.scale = self.own.scale

    def __call__(self) -> Outcome:
        scale = float(self.scale)
        gradients = dict(self._gradients(scale))
        squares = sum(float(gradient.double().square().sum()) for gradient in gradients.values())
        if self.out is not None:
            save_file(gradients, self.out / f"update_{self.done + 1}.safetensors")
        self.model.zero_grad(set_to_none=True)
        self.done += 1
        self.weights.put(self.done)
        norm = torch.tensor(squares ** 0.5, device=self.scale.device)
        return Outcome(norm, norm.isfinite(), torch.zeros((), dtype=torch.int32, device=norm.device), 0.0)

    def _gradients(self, scale: float) -> Iterator[tuple[str, Tensor]]:
        for name, weight in self.model.named_parameters():
            if weight.grad is not None:
                own = gathered(weight, weight.grad)
                yield name, (own if scale == 1 else own.double() / scale).contiguous().clone()

    def state_dict(self) -> dict[str, Any]:
        return self.own.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.own.load_state_dict(state)


def _wide(value: Any) -> Tensor:
    tensor: Tensor = value.detach().double()
    return tensor


def _figures(sums: dict[str, Tensor], targets: float) -> dict[str, Any]:
    """The loss in nats a target, and the model's other terms."""
    terms = {name: value.tolist() for name, value in sums.items() if name != "loss_sum"}
    return {"loss": float(sums["loss_sum"]) / max(targets, 1.0), "terms": terms}
