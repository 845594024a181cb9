"""hardware: which device a worker claims, and how the workers know each other."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    import torch
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True)
class Topology:
    """Where this process stands. data_rank and data_size count the groups that read different data: they follow
    from the mesh, and without one each process is its own group."""

    device: torch.device
    rank: int
    local_rank: int
    world_size: int
    mesh: DeviceMesh | None = None      # None in a run of one process

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @property
    def data_rank(self) -> int:
        return self.rank if self.mesh is None else int(self.mesh.get_local_rank("data"))

    @property
    def data_size(self) -> int:
        return self.world_size if self.mesh is None else int(self.mesh["data"].size())


@runtime_checkable
class Hardware(Protocol):
    device: str                     # cpu, cuda or auto
    processes: int                  # workers on this machine

    def environment(self) -> dict[str, str]:
        """Variables a worker sets before it imports torch."""
        ...

    def claim(self) -> AbstractContextManager[Topology]:
        """Take the device and join the other processes. Raises UnusableEnvironment."""
        ...
