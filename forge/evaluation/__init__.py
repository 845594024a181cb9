"""evaluation: how good the model is on text it was not trained on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    from forge.observe import Observer
    from forge.run import Run


@runtime_checkable
class Evaluation(Protocol):
    def build(self, run: Run) -> Observer:
        """Leaves weights, random state and router state as they are."""
        ...
