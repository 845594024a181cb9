"""The loop, read top to bottom: read -> copy -> augment -> forward -> loss -> backward -> sync -> update."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from torch import Tensor

from forge.agreement import Agreement
from forge.batch import Work
from forge.comm import Sync
from forge.observe import Request
from forge.optimizer import Outcome, Update
from forge.passes import Passes, Terms
from forge.state import Progress


@dataclass(frozen=True)
class Step:
    """One finished update, as observers see it. Tensors stay on the device until someone reads them.

    number: updates done, this one included. targets: scalar, over all ranks. terms: this rank's sums.
    agreed: what any rank asked for, known to all. last: no update follows.
    """

    number: int
    targets: Tensor
    terms: Terms
    outcome: Outcome
    agreed: Request
    last: bool


@dataclass
class Trainer:
    works: Iterator[Work]               # read, copied and augmented: staged by the overlap option
    passes: Passes
    sync: Sync
    update: Update
    after_update: Callable[[Terms, Outcome], None]      # the model's
    progress: Progress
    agreement: Agreement
    mark: Callable[[str], None]
    data_size: int
    asked: Request = field(default=Request.NONE)

    def steps(self, last: int) -> Iterator[Step]:
        """Train until update number `last`, or until all agree to stop, handing out each finished update."""
        agreed = Request.NONE
        while self.progress.step < last and Request.STOP not in agreed:
            self.mark("data_wait")
            work = next(self.works)
            targets, agreed = self.agreement.cast(work.num_targets, self.asked)
            self.asked = Request.NONE
            scale = scale_of(self.update, targets, self.data_size)
            terms = self.passes(work.batches, scale)
            self.sync.finish(self.progress.step)
            self.mark("optimizer")
            outcome = self.update()
            self.after_update(terms, outcome)
            self.progress.advance(work.cursor)
            self.mark("other")
            yield Step(self.progress.step, targets, terms, outcome, agreed,
                       last=self.progress.step == last or Request.STOP in agreed)

    def ask(self, request: Request | None) -> None:
        """What an observer wants; all ranks hear of it in the next update."""
        self.asked |= request or Request.NONE


def scale_of(update: Update, targets: Tensor, data_size: int) -> Tensor:
    """What the sum over a rank's targets is multiplied by, so that the mean of the ranks' gradients is that of the mean
    over all targets."""
    return update.scale * data_size / targets.clamp(min=1)
