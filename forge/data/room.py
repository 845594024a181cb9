"""What a folder of copies holds, who is making one, and what goes to make room for the next."""

from __future__ import annotations

import fcntl
import json
import os
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import NamedTuple

from forge.data.disk import replacing
from forge.data.owner import is_gone, own

_LIST = "room.json"
PART = ".part"
_one_thread = threading.Lock()      # closing a file gives up the record locks that other threads hold on it


def _renew() -> None:
    global _one_thread
    _one_thread = threading.Lock()


os.register_at_fork(after_in_child=_renew)      # a thread that holds it is not there in the child


@dataclass
class Copy:
    """used: when a process last said that it wants it. owner, part: of who is making it and the file it is made in; ""
    once it is whole. since: when that began. Times are seconds since 1970."""

    size: int
    used: float
    owner: str = ""
    part: str = ""
    since: float = 0.0


@dataclass
class Wanted:
    """What a process reads now and next. heard: when it said so."""

    owner: str
    names: list[str]
    heard: float


@dataclass
class _State:
    copies: dict[str, Copy] = field(default_factory=dict)
    wanted: dict[str, Wanted] = field(default_factory=dict)


class UnderWay(NamedTuple):
    """A copy that a process is making. done: bytes so far, in `seconds`."""

    done: int
    seconds: float


class Room:
    """A folder of at most `max_bytes` of copies, at most `num_copies` of which are made at a time, over all processes
    and jobs that share it.

    The list of what is there is one file, written whole under a lock that no process takes along when it is killed. The
    lock is held for no longer than that takes; what is copied meanwhile belongs to the process that the list names.
    """

    def __init__(self, folder: Path, max_bytes: int, num_copies: int) -> None:
        self.folder, self.max_bytes, self.num_copies = folder, max_bytes, num_copies
        self._owner, self._reader = own(), uuid.uuid4().hex

    def place(self, name: str) -> Path:
        """Where the copy is, once it is whole."""
        return self.folder / name

    def want(self, names: Sequence[str]) -> None:
        """This process reads these now or next: nobody takes them away while it lives. Raises OSError."""
        with self._state() as state:
            state.wanted[self._reader] = Wanted(self._owner, list(names), time.time())
            for name in set(names) & state.copies.keys():
                state.copies[name].used = time.time()

    def claim(self, sizes: Mapping[str, int], next_use: Callable[[str], float]) -> tuple[str, Path] | None:
        """The first of these names that can be copied now, and a new file to copy into, which `keep` or `give_up` must
        follow; None: each is there, or being made, or there is no room for it now. Raises OSError.

        sizes: bytes of each, what is needed first first. next_use: larger for what is needed later. What is needed last
        goes first, and what any process wants never.
        """
        with self._state() as state:
            if sum(bool(copy.owner) for copy in state.copies.values()) >= self.num_copies:
                return None
            for name, size in sizes.items():
                if name not in state.copies and self._make_room(state, size, next_use):
                    part = f"{name}.{uuid.uuid4().hex}{PART}"
                    state.copies[name] = Copy(size, time.time(), self._owner, part, time.time())
                    return name, self.folder / part
        return None

    def keep(self, name: str, part: Path) -> None:
        """The copy in `part` is whole, verified and on the disk. Raises OSError."""
        with self._state() as state:
            copy = state.copies.get(name)
            if copy is None or copy.part != part.name:      # given to another, while this process seemed gone
                part.unlink(missing_ok=True)
                return
            os.replace(part, self.place(name))
            copy.owner = copy.part = ""

    def give_up(self, name: str, part: Path) -> None:
        """There will be no copy. Raises OSError."""
        with self._state() as state:
            part.unlink(missing_ok=True)
            if name in state.copies and state.copies[name].part == part.name:
                del state.copies[name]

    def discard(self, name: str) -> None:
        """The copy is bad. Raises OSError."""
        with self._state() as state:
            if name in state.copies and not state.copies[name].owner:
                self._remove(state, name)

    def under_way(self, name: str) -> UnderWay | None:
        """None: nobody is making this copy. Takes no lock and never waits."""
        with suppress(OSError):
            copy = self._read().copies.get(name)
            if copy is not None and copy.owner:
                return UnderWay((self.folder / copy.part).stat().st_size, time.time() - copy.since)
        return None

    def _make_room(self, state: _State, size: int, next_use: Callable[[str], float]) -> bool:
        free = self.max_bytes - sum(copy.size for copy in state.copies.values())
        wanted = {name for each in state.wanted.values() for name in each.names}
        going = sorted((name for name, copy in state.copies.items() if not copy.owner and name not in wanted),
                       key=lambda name: (-next_use(name), state.copies[name].used))
        if free + sum(state.copies[name].size for name in going) < size:
            return False                # nothing goes for what will not fit all the same
        for name in going:
            if free >= size:
                break
            free += state.copies[name].size
            self._remove(state, name)
        return True

    def _remove(self, state: _State, name: str) -> None:
        self.place(name).unlink(missing_ok=True)
        del state.copies[name]

    @contextmanager
    def _state(self) -> Iterator[_State]:
        """The list, without what ended processes left in it; written when the block is done, if it is another then."""
        self.folder.mkdir(parents=True, exist_ok=True)
        # A record lock: unlike flock's, a process that is forked meanwhile does not hold it too. Threads share it
        with _one_thread, open(self.folder / ".lock", "ab") as file:
            fcntl.lockf(file, fcntl.LOCK_EX)
            state = self._read()
            self._forget_the_ended(state)
            yield state
            if (said := json.dumps(asdict(state)).encode()) != self._said():
                with replacing(self.folder / _LIST) as new:
                    new.write(said)

    def _read(self) -> _State:
        try:
            said = json.loads(self._said())
            return _State({name: Copy(**copy) for name, copy in said["copies"].items()},
                          {reader: Wanted(**wanted) for reader, wanted in said["wanted"].items()})
        except (ValueError, KeyError, TypeError, AttributeError):       # none yet, or none that can be read
            return self._found()

    def _said(self) -> bytes:
        with suppress(OSError):
            return (self.folder / _LIST).read_bytes()
        return b""

    def _found(self) -> _State:
        """What lies in the folder. A part is nobody's: whoever makes it will fail, and read the shard itself."""
        state = _State()
        for path in self.folder.glob("*.tar"):
            with suppress(OSError):
                state.copies[path.name] = Copy(path.stat().st_size, path.stat().st_atime)
        return state

    def _forget_the_ended(self, state: _State) -> None:
        for reader, wanted in list(state.wanted.items()):
            if is_gone(wanted.owner, wanted.heard):
                del state.wanted[reader]
        for name, copy in list(state.copies.items()):
            if not copy.owner:
                if not self.place(name).exists():
                    del state.copies[name]
            elif is_gone(copy.owner, self._heard(copy)):
                (self.folder / copy.part).unlink(missing_ok=True)
                if self.place(name).exists():       # it ended between the last two steps
                    copy.owner = copy.part = ""
                else:
                    del state.copies[name]
        known = {copy.part for copy in state.copies.values()}
        for path in self.folder.glob(f"*{PART}"):
            if path.name not in known:
                path.unlink(missing_ok=True)

    def _heard(self, copy: Copy) -> float:
        with suppress(OSError):
            return (self.folder / copy.part).stat().st_mtime
        return copy.since
