"""Folders that forge fills itself: made once, whole or not at all, and full disks told in a sentence."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from forge.errors import UnusableEnvironment
from forge.notes import say

_PATIENCE = 1.0         # seconds that a lock is waited for without a word
_POLLED = 0.02          # seconds between two looks meanwhile

ANOTHER_OUT = "choose another OUT"      # what mends a command that cannot write


def cache_folder(setting: str | None) -> Path:
    """The folder of a `cache` setting; None: forge's part of the user's cache folder."""
    try:
        if setting is not None:
            return Path(setting).expanduser().absolute()
        return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser().absolute() / "forge"
    except RuntimeError as error:       # no such user, or one without a home
        raise UnusableEnvironment(f"No folder to keep data in ({error}): set data.cache or XDG_CACHE_HOME.") from error


@contextmanager
def writing(folder: Path, mend: str) -> Iterator[None]:
    """Tell failures to write below `folder` as UnusableEnvironment; `mend` says where else to write."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise UnusableEnvironment(f"No space is left in {folder}: free some, or {mend}.") from error
        raise UnusableEnvironment(f"Cannot write to {folder} ({error.strerror}): {mend}.") from error


def require_space(folder: Path, num_bytes: int, mend: str) -> None:
    """Raise UnusableEnvironment where the disk of `folder` (which need not exist yet) has less than num_bytes free."""
    there = next(parent for parent in (folder, *folder.parents) if parent.exists())
    free = shutil.disk_usage(there).free
    if free < num_bytes:
        raise UnusableEnvironment(f"{folder} needs {num_bytes / 1e6:,.0f} MB and its disk has {free / 1e6:,.0f} MB "
                                  f"free: free some, or {mend}.")


@contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """A file to write that takes the place of `path` once it is whole. Several processes may do so at once."""
    # mkstemp, and not a name with the process id: two containers that share a folder may share process ids as well
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
    try:
        with open(descriptor, "wb") as file:
            os.fchmod(descriptor, 0o666 & ~_umask())
            yield file
        os.replace(name, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(name)
        raise


def made_once(folder: Path, make: Callable[[Path], None]) -> Path:
    """`folder`, filled by `make` unless it is there. Of several processes one makes it and the others wait.

    `make` fills a temporary folder, renamed when it is whole, so `folder` never holds half of anything. The lock only
    saves work: where a network disk has no locks, each process makes its own and the first rename wins.
    """
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with locked(folder.parent / f".{folder.name}.lock"):
        if folder.is_dir():
            return folder
        making = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", suffix=".tmp", dir=folder.parent))
        try:
            make(making)
            making.chmod(0o777 & ~_umask())
            os.rename(making, folder)
        except OSError:
            if not folder.is_dir():
                raise
        finally:
            shutil.rmtree(making, ignore_errors=True)
    return folder


@contextmanager
def locked(path: Path, waiting: str = "") -> Iterator[None]:
    """One process at a time; that of a process that is killed is free. Where a disk has no locks, nothing is held.

    waiting: said by a process that waits for more than a moment. Raises OSError where `path` cannot be written.
    """
    with open(path, "ab") as file:
        with suppress(OSError):
            if waiting and not _free_soon(file):
                say(waiting)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _free_soon(file: IO[bytes]) -> bool:
    """Then it is held."""
    end = time.monotonic() + _PATIENCE
    while True:
        with suppress(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        if time.monotonic() >= end:
            return False
        time.sleep(_POLLED)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
