"""Where a bench is, for the person who waits: on the standard error, with an estimate of the time that is left."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, field


@dataclass
class Progress:
    """parts: that there are to measure, of about the same length; known once the option has counted them."""

    parts: int = 0
    finished: int = 0
    begun: float = field(default_factory=time.monotonic)
    _shown: float = float("-inf")
    _line: str = ""

    def tell(self, what: str, share: float = 0.0) -> None:
        """share: of the part that runs now which is done."""
        line = f"[{min(self.finished + 1, self.parts)}/{self.parts}] {what}{self._left(share)}"
        if sys.stderr.isatty():
            print(f"\r\x1b[K{line}", end="", file=sys.stderr, flush=True)
        elif time.monotonic() - self._shown > 10 or self._line != what.partition(":")[0]:
            print(line, file=sys.stderr, flush=True)
            self._shown, self._line = time.monotonic(), what.partition(":")[0]

    def done(self) -> None:
        self.finished += 1

    def close(self) -> None:
        if sys.stderr.isatty():
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)

    def _left(self, share: float) -> str:
        done = self.finished + share
        if done < 0.5:
            return ""
        seconds = (time.monotonic() - self.begun) / done * max(0.0, self.parts - done)
        return f", about {seconds:.0f} s left" if seconds < 120 else f", about {seconds / 60:.0f} min left"
