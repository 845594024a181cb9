"""The thread that copies shards ahead of a reader."""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from forge.data.copying import BadCopy, copy_shard
from forge.data.room import Room
from forge.data.storage import Location
from forge.notes import say

_LOOKS_AGAIN = 0.5      # seconds, where others are copying or there was no room
_MOST_FAILURES = 2      # of one shard, after which it is read where it lies until the reader moves on


@dataclass(frozen=True)
class Shard:
    """name: of its copy. size, version: of when it was indexed."""

    name: str
    location: Location
    size: int
    version: int


@dataclass(frozen=True)
class Aim:
    """What a reader wants. wanted: names that must stay. ahead: to be copied, what is needed first first.
    next_use: of a name, larger for what is needed later."""

    wanted: Sequence[str]
    ahead: Sequence[Shard]
    next_use: Callable[[str], float]


@dataclass
class Copier:
    """Copies what `aim` was given last, in a thread that lives as long as the process.

    Whatever fails is told with a count, and leaves the shard to be read where it lies.
    memory: bytes of the copies ahead that the system is asked to hold in memory.
    """

    room: Room
    indices: Path
    memory: int
    num_failed: int = 0
    _said: Callable[[], Aim] | None = None
    _changed: threading.Condition = field(default_factory=threading.Condition)
    _thread: threading.Thread | None = None

    def aim(self, said: Callable[[], Aim]) -> None:
        """Takes no time: the thread does what is to be done, and finds out what that is."""
        with self._changed:
            self._said = said
            self._changed.notify()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="copier", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        done: Callable[[], Aim] | None = None
        while True:
            with self._changed:
                while self._said is done:
                    self._changed.wait()
                said = self._said
            assert said is not None
            try:                            # the copies are a convenience: no fault of theirs may end a run
                aim = said()
            except Exception as error:
                self._failed(f"what is read next cannot be planned ({error})")
            else:
                try:
                    self._follow(said, aim)
                except Exception as error:
                    self._failed(f"{self.room.folder} cannot be used ({error})")
            done = said

    def _follow(self, said: Callable[[], Aim], aim: Aim) -> None:
        """Until all is there, or the reader wants something else."""
        self.room.want(aim.wanted)
        failures: Counter[str] = Counter()
        left = self._into_memory(aim.ahead)
        while left and self._said is said:
            self._copy_each(left, said, aim, failures)
            left = [shard for shard in left if not self.room.place(shard.name).exists()
                    and failures[shard.name] < _MOST_FAILURES]
            if left:
                with self._changed:
                    if self._said is said:
                        self._changed.wait(_LOOKS_AGAIN)

    def _copy_each(self, shards: Sequence[Shard], said: Callable[[], Aim], aim: Aim, failures: Counter[str]) -> None:
        """Those that can be had now, each tried once."""
        left = {shard.name: shard for shard in shards}
        while left and self._said is said:
            claimed = self.room.claim({name: shard.size for name, shard in left.items()}, aim.next_use)
            if claimed is None:
                return
            self._copy(left.pop(claimed[0]), claimed[1], failures)

    def _copy(self, shard: Shard, part: Path, failures: Counter[str]) -> None:
        try:
            copy_shard(shard.location, shard.size, shard.version, part, self.indices)
            self.room.keep(shard.name, part)
        except (BadCopy, OSError) as error:
            failures[shard.name] += 1
            self.room.give_up(shard.name, part)
            why = error.strerror or error if isinstance(error, OSError) else error
            self._failed(f"{shard.location} was not copied to {self.room.folder} ({why})")

    def _failed(self, what: str) -> None:
        self.num_failed += 1
        if self.num_failed & (self.num_failed - 1) == 0:        # the 1st, 2nd, 4th, 8th ...: a dead disk fails often
            say(f"{what}, so it is read where it lies; {self.num_failed} such failures in this process.")

    def _into_memory(self, ahead: Sequence[Shard]) -> list[Shard]:
        """Asks for what is there already; returns what is not."""
        left, missing = self.memory, []
        for shard in ahead:
            try:
                descriptor = os.open(self.room.place(shard.name), os.O_RDONLY | os.O_CLOEXEC)
            except OSError:
                missing.append(shard)
                continue
            with suppress(OSError):
                if shard.size <= left:
                    left -= shard.size
                    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_WILLNEED)
            os.close(descriptor)
        return missing
