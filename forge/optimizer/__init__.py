"""optimizer: how gradients change weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    from torch import Tensor, nn

    from forge.precision import Precision
    from forge.schedule import Schedule


@dataclass(frozen=True)
class Group:
    """Settings for the parameters whose name matches.

    match: a pattern as in a shell ("blocks.0.*", "*.bias"); the first group that matches a name decides.
    lr_scale: times the learning rate. weight_decay: None: the optimizer's own rule.
    frozen: not trained; takes no memory for gradients and state.
    """

    match: str
    lr_scale: float
    weight_decay: float | None
    frozen: bool


@dataclass(frozen=True)
class Outcome:
    """What an update did. Tensors stay on the device until someone reads them.

    norm: scalar float32: the gradient's 2-norm before clipping. applied: scalar bool: False where a gradient was not
    finite and the update was skipped. skipped: scalar int32: how many were, up to and with this one, in a row.
    lr: the learning rate that was used.
    """

    norm: Tensor
    applied: Tensor
    skipped: Tensor
    lr: float


class Update(Protocol):
    """The only code that changes weights: unscale, clip, skip if not finite, step, clear."""

    scale: Tensor           # scalar on the device: what the loss is multiplied by; 1 unless the precision scales

    def __call__(self) -> Outcome: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any]) -> None: ...


@runtime_checkable
class Optimizer(Protocol):
    groups: list[Group]
    max_skipped: int        # updates in a row that may be skipped before the run ends

    def build(self, model: nn.Module, schedule: Schedule, steps: int, precision: Precision) -> Update:
        """steps: the schedule's horizon."""
        ...
