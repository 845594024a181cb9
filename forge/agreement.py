"""What all ranks must know of each other before an update: one small all-reduce, read without waiting."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from forge.hardware import Topology
from forge.observe import Request


class Agreement:
    """Each rank casts how many targets it holds and what it asks for; all learn the sum.

    The number of targets is needed at once, on the device; the requests are read one update later, when they have
    long arrived, so the host never waits for the device.
    """

    def __init__(self, topology: Topology) -> None:
        self.topology = topology
        self._pending: tuple[Tensor, torch.cuda.Event | None] | None = None

    def cast(self, num_targets: int, asked: Request) -> tuple[Tensor, Request]:
        """(targets of all ranks, scalar on the device; what any rank asked for one update ago).

        In a run of one process nothing travels, and requests are answered at once.
        """
        device = self.topology.device
        if self.topology.world_size == 1:
            return torch.full((), float(num_targets), device=device), asked
        ballot = torch.tensor([num_targets, Request.STOP in asked, Request.SNAPSHOT in asked], dtype=torch.int64)
        if device.type == "cuda":
            ballot = ballot.pin_memory().to(device, non_blocking=True)
        dist.all_reduce(ballot)
        agreed = self._read()
        self._pending = self._fetch(ballot)
        return ballot[0].float(), agreed

    def _fetch(self, ballot: Tensor) -> tuple[Tensor, torch.cuda.Event | None]:
        if ballot.device.type == "cpu":
            return ballot, None
        host = torch.empty(ballot.shape, dtype=ballot.dtype, pin_memory=True)
        host.copy_(ballot, non_blocking=True)
        arrived = torch.cuda.Event()
        arrived.record()
        return host, arrived

    def _read(self) -> Request:
        if self._pending is None:
            return Request.NONE
        ballot, arrived = self._pending
        if arrived is not None:
            arrived.synchronize()
        _, stop, snapshot = ballot.tolist()
        return (Request.STOP if stop else Request.NONE) | (Request.SNAPSHOT if snapshot else Request.NONE)


def total(values: Tensor, topology: Topology) -> Tensor:
    """The sum over all ranks; the values themselves in a run of one process."""
    if topology.world_size > 1:
        dist.all_reduce(values)
    return values


def sum_over_ranks(values: Tensor) -> Tensor:
    """A sum over all processes, if there are several, as a new tensor."""
    values = values.clone()
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(values)
    return values


def all_agree(fine: bool, topology: Topology) -> bool:
    """Whether it is fine on every rank. Waits for all: also a barrier."""
    refusals = torch.tensor([0 if fine else 1], device=topology.device)
    return int(total(refusals, topology)) == 0


def of_first(number: int, device: torch.device) -> int:
    """What the first rank says. All ranks call it."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return number
    said = torch.tensor([number], device=device)
    dist.broadcast(said, src=0)
    return int(said)
