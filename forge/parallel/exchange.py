"""Tokens on their way to the ranks that hold their experts, and back: all-to-all, with as many rows as there are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup, Work

    from forge.moe_router.mixture import Execute


@dataclass(frozen=True)
class Exchange:
    """Has the experts of each token computed on the rank that holds them: a `start` of forge.moe_router.mixture.

    Rank r of the group holds experts r * E / size and following. One row travels for each choice of a token, and its
    weight stays at home: so the ranks that compute need no weights, and the gate gets its gradient without a journey.
    A rank or an expert without tokens takes part with zero rows. The host waits for the device once, to learn how many
    rows come.
    """

    group: ProcessGroup

    @torch.compiler.disable     # type: ignore[untyped-decorator]  # sizes are read on the host
    def __call__(self, execute: Execute, tokens: Tensor, experts: Tensor, weights: Tensor, gate_up: Tensor,
                 down: Tensor) -> Callable[[], Tensor]:
        """Send the rows on their way. What is returned waits for them, computes and brings the results home."""
        order = experts.flatten().argsort(stable=True)          # by expert is by rank too; dropped choices come last
        place = torch.empty_like(order).scatter(0, order, torch.arange(order.numel(), device=order.device))
        trip, coming = self._plan(experts, gate_up.shape[0])
        order = order[:sum(trip.going)]
        arriving: Tensor = _Depart.apply(tokens, order, place, trip)            # type: ignore[no-untyped-call]

        @torch.compiler.disable     # type: ignore[untyped-decorator]
        def finish() -> Tensor:
            rows: Tensor = _Arrive.apply(arriving, trip)                        # type: ignore[no-untyped-call]
            ones = weights.new_ones(rows.shape[0], 1)
            out = execute(rows, coming.unsqueeze(-1), ones, gate_up, down)
            mine: Tensor = _Return.apply(out, order, place, trip)               # type: ignore[no-untyped-call]
            each = mine.view(*experts.shape, tokens.shape[-1])
            kept = weights.masked_fill(experts == gate_up.shape[0] * self.group.size(), 0)  # a dropped one's may be nan
            return (each * kept.unsqueeze(-1)).sum(dim=1).to(tokens.dtype)

        return cast("Callable[[], Tensor]", finish)

    def _plan(self, experts: Tensor, num_here: int) -> tuple[Trip, Tensor]:
        """How many rows go where, and the experts, counted from the first one here, of the rows that come."""
        size = self.group.size()
        chosen = torch.zeros(experts.shape[0], size * num_here + 1, dtype=torch.int64, device=experts.device)
        sent = chosen.scatter_(-1, experts, 1).sum(dim=0)[:-1].view(size, num_here)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent.contiguous(), group=self.group)
        going, coming = torch.stack([sent.sum(dim=1), received.sum(dim=1)]).tolist()
        here = torch.arange(num_here, device=experts.device).repeat(size)
        return Trip(self.group, going, coming), here.repeat_interleave(received.flatten(), output_size=sum(coming))


@dataclass
class Trip:
    """going, coming: rows to and from each rank of the group. What is under way is kept until it is waited for."""

    group: ProcessGroup
    going: list[int]
    coming: list[int]
    under_way: tuple[Work, Tensor, Tensor] | None = None

    def there(self, rows: Tensor) -> Tensor:
        """Start to send; the result is whole after `wait`."""
        return self._start(rows, self.going, self.coming)

    def back(self, rows: Tensor) -> Tensor:
        return self._start(rows, self.coming, self.going)

    def wait(self) -> Tensor:
        assert self.under_way is not None
        work, received, _ = self.under_way
        work.wait()
        self.under_way = None
        return received

    def _start(self, rows: Tensor, going: list[int], coming: list[int]) -> Tensor:
        rows = rows.contiguous()
        received = rows.new_empty(sum(coming), rows.shape[-1])
        work = dist.all_to_all_single(received, rows, coming, going, group=self.group, async_op=True)
        self.under_way = work, received, rows
        return received


# Three functions, since what lies between the first and the second, forward and backward, runs beside the journey.
# order: [sent], where in [N * top_k] each row that is sent comes from. place: [N * top_k], where in them it went.
class _Depart(torch.autograd.Function):
    """tokens [N, width] -> rows [received, width] that are still under way."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, order: Tensor, place: Tensor, trip: Trip) -> Tensor:
        ctx.save_for_backward(place)
        ctx.trip, ctx.num_tokens, ctx.top_k = trip, len(tokens), len(place) // max(len(tokens), 1)
        return trip.there(tokens.index_select(0, order // max(ctx.top_k, 1)))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        (place,) = ctx.saved_tensors
        home = _by_choice(ctx.trip.wait(), place)       # and not grads[0], which _Arrive has sent here
        return home.view(ctx.num_tokens, ctx.top_k, home.shape[-1]).sum(dim=1), None, None, None


class _Arrive(torch.autograd.Function):
    """The same rows, whole."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, trip: Trip) -> Tensor:
        ctx.trip = trip
        trip.wait()
        return rows

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        ctx.trip.back(grads[0])
        return grads[0], None


class _Return(torch.autograd.Function):
    """Results [received, width] -> [N * top_k, width], in the order of tokens and their choices."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, order: Tensor, place: Tensor, trip: Trip) -> Tensor:
        ctx.save_for_backward(order)
        ctx.trip = trip
        trip.back(out)
        return _by_choice(trip.wait(), place)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        (order,) = ctx.saved_tensors
        ctx.trip.there(grads[0].index_select(0, order))
        return ctx.trip.wait(), None, None, None


def _by_choice(rows: Tensor, place: Tensor) -> Tensor:
    """rows[place], and zeros for choices that were dropped, whose places lie behind all rows."""
    dropped = len(place) - len(rows)
    return (F.pad(rows, (0, 0, 0, dropped)) if dropped else rows).index_select(0, place)
