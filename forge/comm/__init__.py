"""comm: how the gradients of the ranks meet."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    from torch import Tensor, nn

    from forge.hardware import Topology
    from forge.precision import Precision


class Sync(Protocol):
    """The model as the passes call it, and the moments at which gradients meet."""

    model: nn.Module

    def prepare(self, rehearse: Callable[[], None]) -> None:
        """Before training and before a snapshot is read. rehearse: runs forward and backward once, for nothing."""
        ...

    def micro(self, last: bool) -> AbstractContextManager[None]:
        """Entered around forward and backward of each micro-batch; gradients meet only in the last."""
        ...

    def finish(self, step: int) -> None:
        """After the last backward of update `step`: on return, gradients are the mean over data ranks."""
        ...

    def state_dict(self) -> dict[str, Tensor]: ...
    def load_state_dict(self, state: dict[str, Tensor]) -> None: ...


@runtime_checkable
class Comm(Protocol):
    def build(self, model: nn.Module, topology: Topology, precision: Precision) -> Sync: ...
