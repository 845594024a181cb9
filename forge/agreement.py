"""What all ranks must know of each other before an update: one small all-reduce, read without waiting."""

from __future__ import annotations

from functools import reduce
from operator import or_

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
        ballot = torch.tensor([num_targets, *(request in asked for request in Request)], dtype=torch.int64)
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
        votes = zip(Request, ballot.tolist()[1:], strict=True)
        return reduce(or_, (request for request, count in votes if count), Request.NONE)


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


def gathered(words: str, topology: Topology) -> list[str]:
    """What each rank says, in their order. All ranks call it."""
    if topology.world_size == 1:
        return [words]
    said = torch.frombuffer(bytearray(words.encode()) or bytearray(1), dtype=torch.uint8).to(topology.device)
    sizes = [torch.zeros(1, dtype=torch.int64, device=topology.device) for _ in range(topology.world_size)]
    dist.all_gather(sizes, torch.tensor([len(words.encode())], device=topology.device))
    longest = max(int(size) for size in sizes)
    room = torch.zeros(max(longest, 1), dtype=torch.uint8, device=topology.device)
    room[:len(said)] = said
    all_said = [torch.zeros_like(room) for _ in sizes]
    dist.all_gather(all_said, room)
    return [bytes(each.tolist()[:int(size)]).decode() for each, size in zip(all_said, sizes, strict=True)]


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
