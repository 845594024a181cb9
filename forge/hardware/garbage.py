"""What Python's cyclic garbage collector still walks while a run trains."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

SETTLED = 2     # updates after which what lasts is there: compiled code, gradients, the optimizer's state


@contextmanager
def frozen_once_training() -> Iterator[None]:
    """After update SETTLED, collect once and take all that is alive out of the collector's sight, until the end.

    The collector goes on: cycles that become garbage later are still found. Only what was alive then is no longer
    walked, and no longer freed where it is part of a cycle. Reference counts free everything else, as ever.
    """
    steps: Counter[int] = Counter()     # by optimizer: one of them may call another

    def after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        steps[id(optimizer)] += 1
        if max(steps.values()) == SETTLED and not gc.get_freeze_count():
            gc.collect()                # or garbage would be kept for ever
            gc.freeze()

    hook = register_optimizer_step_post_hook(after_step)
    try:
        yield
    finally:
        hook.remove()
        gc.unfreeze()
