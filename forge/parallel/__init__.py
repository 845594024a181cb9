"""parallel: how the processes are arranged into named axes, and how the model is split over them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh


@runtime_checkable
class Parallel(Protocol):
    def mesh(self, device_type: str, world_size: int) -> DeviceMesh | None:
        """The named axes of this run; None for one process."""
        ...

    def shard(self, model: nn.Module, mesh: DeviceMesh | None) -> nn.Module:
        """Split the model over the mesh; an identity where every process holds all of it."""
        ...
