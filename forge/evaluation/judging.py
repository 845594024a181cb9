"""When the held-out split is judged, and where the figures go: what the options that judge share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from forge.observe import Request

if TYPE_CHECKING:
    from collections.abc import Iterator

    from forge.run import Run
    from forge.trainer import Step


def problems_of(every: int, batches: int) -> Iterator[str]:
    if batches < 1:
        yield f"evaluation.batches={batches}: at least 1 is wanted, or evaluation=none."
    if every < 0:
        yield f"evaluation.every={every}: 0 or more is wanted."


class Judging:
    """Calls `figures` every so many updates, 0: never, and at the end of a run that is not stopped early; then
    `closing` as well. All ranks call both."""

    def __init__(self, run: Run, every: int) -> None:
        from forge.observe.evaluate import Judge

        self.run, self.every = run, every
        self.judge = Judge.of(run.config, run.topology, "heldout")
        self.facts: dict[str, Any] = {"loss_heldout": None}

    def __call__(self, step: Step) -> Request | None:
        finished = step.last and Request.STOP not in step.agreed
        due = self.every > 0 and step.number % self.every == 0
        if finished or due:
            with self.run.phases.pause():
                figures = self.figures()
                self.run.ledger.note(step.number, **figures)
                if finished:
                    self.facts = {**figures, **self.closing()}
        return None

    def figures(self) -> dict[str, float]:
        """What is recorded each time, "loss_heldout" among it."""
        raise NotImplementedError

    def closing(self) -> dict[str, Any]:
        """What is shown once, at the end of the run."""
        return {}

    def result(self) -> dict[str, Any]:
        return self.facts
