"""Works read by worker processes, in the order of the positions."""

from __future__ import annotations

import atexit
import os
import pickle
import signal
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils import data

from forge.batch import Cursor, Work
from forge.errors import ForgeError
from forge.feed import Feed
from forge.process import die_with_parent

_ENDING = {signal.SIGINT, signal.SIGTERM}
_ALIGNED = 64       # bytes: where a tensor may begin in a shared buffer; a cache line, and any dtype's size divides it


class FromWorkers:
    """A Reader. pinned: works arrive in page-locked memory."""

    def __init__(self, feed: Feed, num_workers: int, prefetch_factor: int, persistent: bool, pinned: bool) -> None:
        self._feed, self._order = feed, _Order(feed)
        self._loader: data.DataLoader[Any] = data.DataLoader(
            _Works(feed), batch_size=None, sampler=self._order, collate_fn=_unchanged, num_workers=num_workers,
            prefetch_factor=prefetch_factor if num_workers else None,
            persistent_workers=persistent and num_workers > 0, pin_memory=pinned,
            worker_init_fn=partial(_only_read, os.getpid()),
            multiprocessing_context="fork" if num_workers else None,    # the source is inherited, not sent
            generator=torch.Generator())        # the global one belongs to the model: a run resumes exactly
        self._running: Any = None

    def seek(self, cursor: Cursor) -> None:
        self._order.start = cursor

    def __iter__(self) -> Iterator[Work]:
        if not self._loader.persistent_workers:
            self.close()
        with _held_back():
            self._running = iter(self._loader)
        # Before multiprocessing's own exit hook, which asks with SIGTERM and would wait for workers that ignore it
        atexit.register(self.close)
        return self._works(self._running)

    def close(self) -> None:
        atexit.unregister(self.close)
        running, self._running, self._loader._iterator = self._running, None, None
        if running is not None and self._loader.num_workers:
            # torch raises, in whatever is being done, when it hears that a worker has died: also in here.
            with suppress(RuntimeError):
                running._shutdown_workers()
            for worker in running._workers:
                with suppress(RuntimeError):
                    if worker.is_alive():       # stuck in a read that does not end
                        worker.kill()
                        worker.join()
        self._feed.close()

    def _works(self, running: Any) -> Iterator[Work]:
        while True:
            try:
                read = next(running)
            # Nothing that the feed raises comes this way: see _Works. What a dead worker sent may still refer to it.
            except (RuntimeError, ConnectionError, EOFError, FileNotFoundError) as error:
                self.close()
                said = str(error).split(". ")[0].strip() if isinstance(error, RuntimeError) else \
                    "DataLoader worker exited unexpectedly, with what it had read"
                raise ForgeError(f"{said}. Most often memory ran out: lower "
                                 "dataloader.workers or dataloader.prefetch_factor; dataloader=simple shows what an "
                                 "error in reading says.") from error
            if isinstance(read, _Failure):
                self.close()
                raise read.error
            yield read.unpacked()


class _Order:
    """Positions without end, from `start`."""

    def __init__(self, feed: Feed) -> None:
        self._feed = feed
        self.start = Cursor()

    def __iter__(self) -> Iterator[Cursor]:
        cursor = self.start
        while True:
            yield cursor
            self._feed.nearing(cursor)
            cursor = self._feed.after(cursor)


@dataclass(frozen=True)
class _Works(data.Dataset["_Parcel | _Failure"]):
    """Read in a worker. An error is handed over as a value: DataLoader would wrap its sentence in a traceback."""

    feed: Feed

    def __getitem__(self, cursor: Cursor) -> _Parcel | _Failure:
        try:
            self.feed.coming(cursor)
            return _Parcel.packed(self.feed[cursor])
        except Exception as error:
            return _Failure.of(error)


@dataclass(frozen=True)
class _Failure:
    """What went wrong in a worker, to be raised where the work was waited for."""

    error: Exception

    @staticmethod
    def of(error: Exception) -> _Failure:
        seen = traceback.format_exc()
        try:
            sent: Exception = pickle.loads(pickle.dumps(error))
        except Exception:                   # its class cannot be sent to another process
            sent = RuntimeError(f"{type(error).__name__}: {error}")
        sent.__traceback__ = None
        if not isinstance(error, ForgeError):
            sent.add_note(f"In a data worker:\n{seen}")
        return _Failure(sent)


@dataclass(frozen=True)
class _Parcel:
    """A work whose tensors lie in one buffer, because each tensor that crosses a process costs an open file.

    work: without tensors. layout: of each batch, name -> (first byte, dtype, shape).
    """

    work: Work
    layout: list[dict[str, tuple[int, torch.dtype, torch.Size]]]
    buffer: Tensor

    @staticmethod
    def packed(work: Work) -> _Parcel:
        batches = list(work.batches)
        layout: list[dict[str, tuple[int, torch.dtype, torch.Size]]] = []
        size = 0
        for batch in batches:
            layout.append({})
            for name, tensor in batch.tensors.items():
                layout[-1][name] = (size, tensor.dtype, tensor.shape)
                size += -(-tensor.nbytes // _ALIGNED) * _ALIGNED
        parcel = _Parcel(replace(work, batches=[replace(batch, tensors={}) for batch in batches]), layout,
                         torch.empty(size, dtype=torch.uint8))
        for batch, views in zip(batches, parcel.unpacked().batches, strict=True):
            for name, tensor in batch.tensors.items():
                views.tensors[name].copy_(tensor)
        return parcel

    def unpacked(self) -> Work:
        """The work; its tensors are views of the buffer."""
        return replace(self.work, batches=[
            replace(batch, tensors={name: self._view(*place) for name, place in places.items()})
            for batch, places in zip(self.work.batches, self.layout, strict=True)])

    def pin_memory(self) -> _Parcel:
        return replace(self, buffer=self.buffer.pin_memory())

    def _view(self, first: int, dtype: torch.dtype, shape: torch.Size) -> Tensor:
        return self.buffer[first:first + shape.numel() * dtype.itemsize].view(dtype).view(shape)


def _unchanged(read: Any) -> Any:
    return read


@contextmanager
def _held_back() -> Iterator[None]:
    """Signals wait meanwhile, and in processes that start meanwhile until those unblock them: a worker that has not
    yet come to _only_read would die of one."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _only_read(rank: int, worker: int) -> None:
    """Ctrl-C and a scheduler's SIGTERM reach every process. The rank decides what they mean; until it closes the
    reader, it still needs what its workers read. Without it nobody does: torch would wait for a read to end, and then
    for somebody to take what was read. rank: the number of its process."""
    die_with_parent(rank)
    for ending in _ENDING:
        signal.signal(ending, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _ENDING)
