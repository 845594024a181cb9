"""What a side's optimizer makes of given gradients."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import safe_open
from safetensors.torch import save_file

from forge.build import build_model
from forge.config import Config
from forge.verify.called import watched
from forge.verify.gradients_of import Weights, adjusted, start_from

MOST_RATES = 1000       # of a long schedule, every so many steps are looked at

if TYPE_CHECKING:
    from forge.hardware import Topology
    from forge.verify.job import Job


def measure_update(config: Config, job: Job, topology: Topology, out: Path) -> dict[str, Any]:
    """Leaves update_1.safetensors: by how much each weight has changed after an update for each factor of the given
    gradients; and stored_1.safetensors: the same of the masters, where there are.

    Returns "rates": the schedule's factors over the run."""
    config, calls = watched(adjusted(config, job), job.watch)
    model = build_model(config, topology)
    foreign = start_from(model, Path(job.weights), topology)
    if foreign:
        return {"foreign": foreign}
    Weights(model, Path(job.weights)).as_given()
    before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    update = config.optimizer.build(model, config.schedule, config.steps, config.precision)
    for factor in job.factors:
        with safe_open(job.gradients, "pt") as file:
            known = set(file.keys())
            for name, weight in model.named_parameters():
                if weight.requires_grad and name in known:
                    weight.grad = file.get_tensor(name).to(weight) * factor * update.scale.to(weight.dtype)
        update()
    changed = {name: (weight.detach().double() - before[name].double()).cpu().contiguous()
               for name, weight in model.named_parameters()}
    state = update.state_dict()
    stored = {name: (state[f"{name}/master"].detach().double() - before[name].double()).cpu().contiguous()
              if f"{name}/master" in state else change for name, change in changed.items()}
    if topology.is_first:
        save_file(stored, out / "stored_1.safetensors")
        save_file(changed, out / "update_1.safetensors")
    rates = [config.schedule(step, config.steps) for step in range(0, config.steps, -(-config.steps // MOST_RATES))]
    return {"rates": rates, "compute": config.precision.compute, "calls": calls}
