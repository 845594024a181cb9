"""verify: what is compared between two configurations, and what is concluded from it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from forge.errors import Exit

if TYPE_CHECKING:
    from forge.verify.pair import Pair
    from forge.verify.record import Record

SAME_BITS = "same bits"
SAME_MATHS = "same maths"
SAME_ROUNDING = "same within rounding"
SAME_METRIC = "same final metric"
BY_DESIGN = "differs by design"
DIFFERS = "differs"
CANNOT_JUDGE = "cannot judge"


@dataclass(frozen=True)
class Verdict:
    """verdict: one of the above; after BY_DESIGN follows ": " and the setting. reason: a sentence with figures."""

    verdict: str
    reason: str

    @property
    def exit_code(self) -> Exit:
        return {DIFFERS: Exit.ASSERTION_FAILED, CANNOT_JUDGE: Exit.CANNOT_JUDGE}.get(self.verdict, Exit.ANSWERED)


@runtime_checkable
class Verify(Protocol):
    def __call__(self, pair: Pair, record: Record) -> Verdict:
        """Run both sides, note in the record what is measured as soon as it is, and conclude. Raises ForgeError."""
        ...
