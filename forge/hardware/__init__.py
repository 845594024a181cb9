"""hardware: which device a worker claims, and how the workers know each other."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    import torch
    from torch.distributed.device_mesh import DeviceMesh


READING = ("data", "expert")     # axes along which ranks read different rows, outer first


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
        rank = 0
        for axis, size in self._reading():
            rank = rank * size + int(self.mesh.get_local_rank(axis))    # type: ignore[union-attr]
        return self.rank if self.mesh is None else rank

    @property
    def data_size(self) -> int:
        return self.world_size if self.mesh is None else prod(size for _, size in self._reading())

    def _reading(self) -> list[tuple[str, int]]:
        mesh = self.mesh
        return [] if mesh is None else [(axis, int(mesh[axis].size())) for axis in READING
                                        if axis in (mesh.mesh_dim_names or ())]


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
