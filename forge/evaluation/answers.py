"""The share of held-out samples that are answered exactly, beside the loss."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from forge.evaluation.judging import Judging, problems_of

if TYPE_CHECKING:
    from forge.config import Config
    from forge.run import Run


@dataclass(frozen=True)
class Answers:
    """every: updates between evaluations; 0: only at the end. batches: micro-batches of each rank, at most; the same
    ones each time."""

    every: int
    batches: int

    def problems(self, config: Config) -> Iterator[str]:
        yield from problems_of(self.every, self.batches)

    def build(self, run: Run) -> AnswersObserver:
        return AnswersObserver(run, self)


class AnswersObserver(Judging):
    """"exact", and "exact_KIND" where the source knows the kinds of its samples."""

    def __init__(self, run: Run, settings: Answers) -> None:
        super().__init__(run, settings.every)
        self.batches = settings.batches

    def figures(self) -> dict[str, float]:
        from forge.observe.answers import answered

        found = answered(self.judge, self.run.model, self.batches)
        kinds: np.ndarray | None = getattr(self.judge.source, "kinds", None)
        of_kinds = {} if kinds is None else found.exact_by(kinds)
        return {"loss_heldout": found.loss, "exact": found.exact,
                **{f"exact_{kind}": share for kind, share in of_kinds.items()}}
