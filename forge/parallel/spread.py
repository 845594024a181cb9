"""Parameters of which each rank holds a slice: which they are, and who holds the rest. Whoever reduces gradients,
takes norms or saves a run asks here, and need not know what they are slices of."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_spread = WeakTensorKeyDictionary()


@dataclass(frozen=True)
class Spread:
    """How one parameter is cut into equal slices.

    whole: its shape before. dim: along which it is cut. axis: the ranks that hold it together, slices in the order of
    ranks. replicas: the ranks that hold the same slice as this one, which is among them.
    """

    whole: torch.Size
    dim: int
    axis: ProcessGroup
    replicas: ProcessGroup

    @property
    def shape(self) -> torch.Size:
        """Of one slice."""
        sizes = list(self.whole)
        sizes[self.dim] //= self.axis.size()
        return torch.Size(sizes)

    def place(self, rank: int) -> tuple[slice, ...]:
        """Where the slice of this rank of the axis lies in the whole: an index for tensors and for files."""
        length = self.shape[self.dim]
        along = slice(rank * length, (rank + 1) * length)
        return tuple(along if dim == self.dim else slice(0, size) for dim, size in enumerate(self.whole))

    @property
    def mine(self) -> tuple[slice, ...]:
        return self.place(self.axis.rank())

    @property
    def axis_has_first(self) -> bool:
        """Whether the first rank of the run is on the axis: then what it writes is gathered there."""
        return dist.get_global_rank(self.axis, 0) == 0

    def gather(self, mine: Tensor) -> Tensor:
        """The whole tensor, on the host of the axis's first rank; elsewhere what was given. All ranks of the axis call
        it. The first rank holds one whole tensor and one slice of another rank at a time."""
        if self.axis.rank() > 0:
            dist.send(mine.contiguous(), group=self.axis, group_dst=0)
            return mine
        whole = torch.empty(self.whole, dtype=mine.dtype)
        whole[self.place(0)] = mine.cpu()
        received = torch.empty_like(mine, memory_format=torch.contiguous_format)
        for rank in range(1, self.axis.size()):
            dist.recv(received, group=self.axis, group_src=rank)
            whole[self.place(rank)] = received.cpu()
        return whole


def cut(whole: nn.Parameter, dim: int, axis: ProcessGroup, replicas: ProcessGroup) -> nn.Parameter:
    """This rank's slice, as a parameter of its own whose spread is known from now on."""
    spread = Spread(whole.shape, dim, axis, replicas)
    mine = nn.Parameter(whole.detach()[spread.mine].clone(), requires_grad=whole.requires_grad)
    _spread[mine] = spread
    return mine


def spread_of(parameter: Tensor) -> Spread | None:
    """None: every rank holds all of it."""
    found: Spread | None = _spread.get(parameter)
    return found


def whole_shape(parameter: Tensor) -> torch.Size:
    spread = spread_of(parameter)
    return parameter.shape if spread is None else spread.whole


def gathered(parameter: Tensor, tensor: Tensor) -> Tensor:
    """What belongs to a parameter (its value, its gradient), whole and on the host: see Spread.gather."""
    spread = spread_of(parameter)
    return tensor.detach().cpu() if spread is None else spread.gather(tensor.detach())


def mine_of(parameter: Tensor, whole: Tensor) -> Tensor:
    """This rank's part of what belongs to a parameter."""
    spread = spread_of(parameter)
    return whole if spread is None else whole[spread.mine]


def spread_in(model: nn.Module) -> dict[str, Spread]:
    """Of each parameter that is spread, by its name."""
    found = {name: spread_of(parameter) for name, parameter in model.named_parameters()}
    return {name: spread for name, spread in found.items() if spread is not None}


def with_all_slices(parameters: Sequence[Tensor], figures: Sequence[Tensor]) -> Tensor:
    """One figure (a scalar) of each parameter, where each slice of a spread one counts: [at least len(parameters)].

    All ranks of the axes call it, and get the same figures in the same order.
    """
    of_axis: dict[ProcessGroup, list[Tensor]] = defaultdict(list)
    found: list[Tensor] = []
    for parameter, figure in zip(parameters, figures, strict=True):
        spread = spread_of(parameter)
        (found if spread is None else of_axis[spread.axis]).append(figure)
    parts = [torch.stack(found)] if found else []
    for axis, mine in of_axis.items():
        part = torch.stack(mine)
        of_ranks = [torch.empty_like(part) for _ in range(axis.size())]
        dist.all_gather(of_ranks, part, group=axis)
        parts += of_ranks
    return torch.cat(parts)
