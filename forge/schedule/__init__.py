"""schedule: the learning rate over the run, as a factor of the optimizer's rate."""

from typing import Protocol, runtime_checkable


@runtime_checkable
class Schedule(Protocol):
    def __call__(self, step: int, steps: int) -> float:
        """The factor for update number `step` (the first is 0) of `steps`. A pure function, so nothing is saved."""
        ...
