"""Where a bench is, for the person who waits: on the standard error, with an estimate of the time that is left."""

from __future__ import annotations

import shutil
import sys
import time
from dataclasses import dataclass, field

MINUTE = 60
NAME_WIDTH = 32         # of what is measured, in the line


@dataclass
class Progress:
    """parts: that there are to measure, of about the same length; known once the option has counted them. stage: what
    they are. then: what follows them, whose length nobody knows."""

    parts: int = 0
    stage: str = "step"
    then: str = ""
    finished: int = 0
    begun: float = field(default_factory=time.monotonic)
    _shown: float = float("-inf")
    _about: tuple[str, str] = ("", "")
    _each: float = 0.0      # seconds of a part, when the last one finished
    _counted: int = 0

    def measure(self, parts: int, stage: str = "step", then: str = "") -> None:
        """From now on, so many parts of this stage."""
        self.parts, self.stage, self.then = parts, stage, then
        self.finished, self._counted, self.begun = 0, 0, time.monotonic()

    def start_over(self) -> None:
        """The first part begins: what came before (the start of the baseline) is not taken for a part of each."""
        self.measure(self.parts, self.stage, self.then)

    def tell(self, what: str, does: str) -> None:
        """what: is measured. does: what is done with it now."""
        number = f"{self.stage} {min(self.finished + 1, self.parts)} of {self.parts}: " if self.parts else ""
        kind = does.partition(" ")[0]       # a line for each block would be too many
        about = what if len(what) <= NAME_WIDTH else what[:NAME_WIDTH - 3] + "..."
        line = f"{number}{about}: {does}{self._left()}"
        if sys.stderr.isatty():         # a line that is wrapped could not be overwritten
            print(f"\r\x1b[K{line[:shutil.get_terminal_size().columns - 1]}", end="", file=sys.stderr, flush=True)
        elif time.monotonic() - self._shown > 10 or self._about != (what, kind):
            print(line, file=sys.stderr, flush=True)
            self._shown, self._about = time.monotonic(), (what, kind)

    def done(self) -> None:
        self.finished += 1

    def close(self) -> None:
        if sys.stderr.isatty():
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)

    def _left(self) -> str:
        """By the parts that are finished; before there is one, nothing is known."""
        if not self.finished:
            return ""
        spent = time.monotonic() - self.begun
        self._each = spent / self.finished if self.finished != self._counted else self._each
        self._counted = self.finished
        left = self._each * self.parts - spent
        told = f"{max(left, 1):.0f} s" if left < 2 * MINUTE else f"{left / MINUTE:.0f} min"
        return f", about {told} left" + (f", then {self.then}" if self.then else "")
