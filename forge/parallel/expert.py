"""Expert parallelism: the experts of each layer are split over ranks, and tokens travel to them. All else is data
parallel."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from forge.errors import ConfigError

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    from forge.config import Config


@dataclass(frozen=True)
class ExpertParallel:
    """size: neighbouring ranks over which the experts of each layer are split; 1: data parallelism."""

    size: int

    def problems(self, config: Config) -> Iterator[str]:
        routing = getattr(config.model, "routing", None)
        if self.size < 1:
            yield f"parallel.size={self.size}: at least 1 is wanted."
            return
        if routing is None:
            yield "parallel=expert splits experts, and this model has none: set parallel=data."
        elif routing.num_experts % self.size:
            yield (f"parallel.size={self.size} does not divide model.routing.num_experts={routing.num_experts}: each "
                   f"rank holds the same number of experts.")
        world = config.hardware.processes * getattr(config.launch, "nodes", 1)
        if world % self.size:
            yield self._uneven(world)
        if self.size > 1 and getattr(config.compile, "fullgraph", False):
            yield ("parallel=expert asks how many tokens each expert got, which no single graph can hold: set "
                   "compile.fullgraph=false.")

    def mesh(self, device_type: str, world_size: int) -> DeviceMesh | None:
        """Axes data (replicas of each expert) and expert; ranks that share the experts are neighbours."""
        if world_size % self.size:          # the ranks of all nodes, of which problems() knows what was planned
            raise ConfigError(self._uneven(world_size))
        if world_size == 1:
            return None
        from torch.distributed.device_mesh import init_device_mesh

        shape = (world_size // self.size, self.size)
        mesh = init_device_mesh(device_type, shape, mesh_dim_names=("data", "expert"))
        for group in mesh.get_all_groups():
            _wait_as_all_do(group, device_type)
        return mesh

    def shard(self, model: nn.Module, mesh: DeviceMesh | None) -> nn.Module:
        """Keep this rank's experts of what was drawn whole, so that they are those of a run in one process."""
        if mesh is None or self.size == 1:
            return model
        from forge.moe_router.mixture import Mixture
        from forge.parallel.exchange import Exchange
        from forge.parallel.spread import cut

        mixtures = [module for module in model.modules() if isinstance(module, Mixture)]
        if not mixtures:
            raise ConfigError("parallel=expert finds no mixture of forge's own in this model, and knows no other: set "
                              "parallel=data.")
        axis, replicas = mesh.get_group("expert"), mesh.get_group("data")
        for mixture in mixtures:
            mixture.gate_up = cut(mixture.gate_up, 0, axis, replicas)
            mixture.down = cut(mixture.down, 0, axis, replicas)
            mixture.start = Exchange(axis)
        return model

    def _uneven(self, world_size: int) -> str:
        return (f"parallel.size={self.size} does not divide the {world_size} ranks of this run (hardware.processes, "
                f"over all nodes): make them a multiple of {self.size}, or set parallel.size to a divisor of them.")


def _wait_as_all_do(group: ProcessGroup, device_type: str) -> None:
    """Give a group the timeout of all ranks (hardware.timeout_seconds): a mesh makes groups with torch's own."""
    import torch
    import torch.distributed as dist

    everyone: Any = dist.group.WORLD
    timeout = everyone._get_backend(torch.device(device_type)).options._timeout
    dist.distributed_c10d._set_pg_timeout(timeout, group)
