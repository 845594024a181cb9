"""data.staging: shards are copied from slow storage to a local disk, ahead of their use by the plan of the epoch."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from forge.data.copier import Aim, Copier, Shard
from forge.data.disk import require_space
from forge.data.pins import Pins
from forge.data.room import Room
from forge.data.samples import Samples
from forge.data.storage import File, Location, open_file, shared_file
from forge.notes import say

_POLLED = 0.005         # seconds between two looks at a copy that is waited for

Order = Callable[[int, int], tuple[np.ndarray, np.ndarray]]     # see forge.data.reading.Reading.order


@dataclass(frozen=True)
class Staging:
    """folder: on a local disk; None: a folder in data.cache. Ranks, runs and users of a machine may share it.
    max_gb: of copies, over all who share the folder, in 10^9 bytes. memory_gb: of the copies that come next, which the
    system is asked to read into memory ahead of use; 0: none.
    ahead: shuffle windows that are copied before they are read. copies: shards that are copied at a time, over all
    who share the folder. pins: None: what is needed last goes first.
    """

    folder: str | None
    max_gb: float
    memory_gb: float
    ahead: int
    copies: int
    pins: Pins | None

    def problems(self, shuffle_shards: int | None) -> Iterator[str]:
        if shuffle_shards is None:
            yield ("data.staging copies shards in the order of the shuffle windows, and data.shuffle_shards=null mixes "
                   "all shards at once: set data.shuffle_shards=8, for example, or data.staging=null")
        if self.max_gb <= 0:
            yield f"data.staging.max_gb={self.max_gb}: more than 0 is wanted, or data.staging=null"
        if self.memory_gb < 0:
            yield f"data.staging.memory_gb={self.memory_gb}: 0 or more is wanted"
        for name in ("ahead", "copies"):
            if getattr(self, name) < 1:
                yield f"data.staging.{name}={getattr(self, name)}: at least 1 is wanted"
        if self.pins is not None:
            yield from self.pins.problems()

    def open(self, cache: Path) -> Staged:
        """Copies of shards, those that are there. None is made before `follow` and the first `coming`."""
        return Staged(self, Path(self.folder).expanduser().absolute() if self.folder else cache / "staged", cache)


class Staged:
    """Finds the copies of shards, and has those copied that come next. Can be sent to a worker process.

    A reader never waits for a copy longer than it would take to read directly: what is not there yet is read where it
    lies.
    """

    def __init__(self, settings: Staging, folder: Path, cache: Path) -> None:
        self._settings, self._folder, self._cache = settings, folder, cache
        self._max_bytes = int(settings.max_gb * 1e9)
        self._state: _Here | None = None

    def follow(self, samples: Samples, order: Order, window: int) -> None:
        """Copy the shards that hold `samples`, in that order. window: shards that are mixed at a time.

        Raises ForgeError.
        """
        self._shards_of, self._bytes_of, self._order = samples.texts.shards, samples.num_bytes, order
        files = samples.texts.files
        self._shards = {number: Shard(_name(*files[number]), *files[number])
                        for number in np.unique(self._shards_of).tolist()}
        pins = self._settings.pins
        self._pinned = [] if pins is None else pins.pinned(list(self._shards.values()), self._max_bytes)
        sizes = sorted((shard.size for shard in self._shards.values()), reverse=True)
        there = sum(shard.size for shard in self._shards.values() if (self._folder / shard.name).exists())
        require_space(self._folder, min(sum(sizes), self._max_bytes) - there,
                      "lower data.staging.max_gb, or set data.staging.folder to another disk")
        if sum(sizes[:window * (self._settings.ahead + 1)]) > self._max_bytes:
            say(f"data.staging.max_gb={self._settings.max_gb} does not hold {self._settings.ahead + 1} windows of "
                f"data.shuffle_shards={window} shards, so fewer are copied ahead: raise max_gb, or lower the others.")

    def coming(self, seed: int, epoch: int, samples: Sequence[int]) -> None:
        """`samples` of epoch `epoch` are read next in this process."""
        here, windows = self._here(), self._windows(seed, epoch)
        if not samples:
            return
        window = int(np.median(windows.of_samples[np.asarray(samples)]))
        if here.at != (seed, epoch, window):
            soon = windows.shards[window:window + 1 + self._settings.ahead]
            names = {self._shards[number].name for shards in soon for number in shards}
            here.turn_to((seed, epoch, window), names, partial(self._aim, seed, epoch, window))
        here.wait(self._wanted_bytes(samples))

    def copies(self, location: Location, size: int, version: int) -> Iterator[File]:
        """The copy of a shard; where there is none, the shard itself. Who asks for more found it bad."""
        here, name = self._here(), _name(location, size, version)
        if (copy := here.opened(name, size)) is not None:
            yield copy
            here.discard(name, location)
        else:
            with suppress(OSError):     # told by whoever reads it once more
                yield _Timed(shared_file(location, size, version), here)

    def _aim(self, seed: int, epoch: int, window: int) -> Aim:
        """Also plans the next epoch's windows, which takes seconds for millions of samples: for another thread."""
        order: list[Shard] = [self._shards[number] for number in self._from(seed, epoch, window)]
        now = self._windows(seed, epoch).shards[window]
        later = self._following(seed, epoch, window)
        next_use = {shard.name: place for place, shard in reversed(list(enumerate(order)))}
        ahead = [self._shards[number] for number in later] + self._pinned
        wanted = [self._shards[number].name for number in now] + [shard.name for shard in ahead]
        return Aim(wanted, list(dict.fromkeys(ahead)), lambda name: next_use.get(name, len(order)))

    def _from(self, seed: int, epoch: int, window: int) -> list[int]:
        """Shards as they are read from here on, up to the end of the next epoch."""
        rest = self._windows(seed, epoch).shards[window:] + self._windows(seed, epoch + 1).shards
        return [number for shards in rest for number in shards]

    def _following(self, seed: int, epoch: int, window: int) -> list[int]:
        rest = self._windows(seed, epoch).shards[window + 1:] + self._windows(seed, epoch + 1).shards
        return [number for shards in rest[:self._settings.ahead] for number in shards]

    def _windows(self, seed: int, epoch: int) -> _Windows:
        return _windows(self, seed, epoch)

    def _wanted_bytes(self, samples: Sequence[int]) -> dict[Shard, int]:
        wanted: dict[Shard, int] = {}
        for sample in dict.fromkeys(samples):
            shard = self._shards[int(self._shards_of[sample])]
            wanted[shard] = wanted.get(shard, 0) + int(self._bytes_of[sample])
        return wanted

    def _here(self) -> _Here:
        if self._state is None or self._state.process != os.getpid():
            room = Room(self._folder, self._max_bytes, self._settings.copies)
            self._state = _Here(Copier(room, self._cache, int(self._settings.memory_gb * 1e9)))
        return self._state

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_state": None}


class _Here:
    """What belongs to one process: its thread, its open files, and how fast it saw storage be."""

    def __init__(self, copier: Copier) -> None:
        self.process, self.copier, self.room = os.getpid(), copier, copier.room
        self.at: tuple[int, int, int] | None = None
        self.direct_bytes, self.direct_seconds = 0, 0.0
        self._open: dict[str, File] = {}

    def turn_to(self, at: tuple[int, int, int], soon: Collection[str], said: Callable[[], Aim]) -> None:
        """soon: names of what is read now and next; other copies are closed."""
        self.at = at
        self._open = {name: file for name, file in self._open.items() if name in soon}
        self.copier.aim(said)

    def opened(self, name: str, size: int) -> File | None:
        if name not in self._open:
            try:
                file = open_file(self.room.place(name))
            except OSError:
                return None
            if file.size != size:
                return None
            self._open[name] = _Checked(file)
        return self._open[name]

    def discard(self, name: str, location: Location) -> None:
        self._open.pop(name, None)
        with suppress(OSError):
            self.room.discard(name)
        say(f"The copy of {location} in {self.room.folder} is not what was copied there: it is thrown away. Look after "
            "that disk.")

    def wait(self, wanted: Mapping[Shard, int]) -> None:
        """For copies that are nearly done: no longer than to read `wanted` bytes of each shard directly takes."""
        for shard, num_bytes in wanted.items():
            if self.opened(shard.name, shard.size) is not None or not self.direct_seconds:
                continue
            patience = num_bytes * self.direct_seconds / self.direct_bytes
            started = time.monotonic()
            while (left := patience - (time.monotonic() - started)) > 0:
                copy = self.room.under_way(shard.name)
                if copy is None or not copy.done or (shard.size - copy.done) * copy.seconds / copy.done > left:
                    break
                time.sleep(min(_POLLED, left))


class _Checked:
    """A copy. What cannot be read of it is no bytes, so that its reader turns to the shard itself."""

    def __init__(self, file: File) -> None:
        self._file = file
        self.size, self.version = file.size, file.version

    def read(self, size: int, offset: int) -> bytes:
        with suppress(OSError):
            return self._file.read(size, offset)
        return b""


class _Timed(_Checked):
    """A shard where it lies. How fast it is read tells how long a copy may be waited for."""

    def __init__(self, file: File, here: _Here) -> None:
        super().__init__(file)
        self._here = here

    def read(self, size: int, offset: int) -> bytes:
        started = time.perf_counter()
        data = super().read(size, offset)
        self._here.direct_bytes += len(data)
        self._here.direct_seconds += time.perf_counter() - started
        return data


@dataclass(frozen=True, eq=False)
class _Windows:
    """The shuffle windows of an epoch. of_samples: [samples] int64, the window that a sample is read in. shards: of
    each window, in the order of their first samples."""

    of_samples: np.ndarray
    shards: list[list[int]]


@lru_cache(maxsize=4)
def _windows(staged: Staged, seed: int, epoch: int) -> _Windows:
    samples, blocks = staged._order(seed, epoch)
    numbers = np.cumsum(np.diff(blocks, prepend=blocks[:1]) > 0)
    of_samples = np.zeros(len(staged._shards_of), np.int64)
    of_samples[samples] = numbers
    pairs = np.stack([numbers, staged._shards_of[samples]], axis=1)
    _, first = np.unique(pairs, axis=0, return_index=True)
    shards: list[list[int]] = [[] for _ in range(int(numbers[-1]) + 1)]
    for window, shard in pairs[np.sort(first)].tolist():
        shards[window].append(shard)
    return _Windows(of_samples, shards)


def _name(location: Location, size: int, version: int) -> str:
    """Of a copy: another one for another content, and readable for people."""
    digest = hashlib.blake2b(f"{location}\0{size}\0{version}".encode("utf-8", "surrogateescape"), digest_size=8)
    return f"{str(location).rpartition('/')[2].removesuffix('.tar')[-80:]}-{digest.hexdigest()}.tar"
