"""Data parallelism: every process holds the whole model and reads its own share of each global batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True)
class DataParallel:
    def mesh(self, device_type: str, world_size: int) -> DeviceMesh | None:
        if world_size == 1:
            return None
        from torch.distributed.device_mesh import init_device_mesh

        return init_device_mesh(device_type, (world_size,), mesh_dim_names=("data",))

    def shard(self, model: nn.Module, mesh: DeviceMesh | None) -> nn.Module:
        return model
