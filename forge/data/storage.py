"""Where shards lie: in local or mounted folders, or at an address that fsspec opens ("s3://...", "memory://...")."""

from __future__ import annotations

import glob
import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

from forge.errors import ConfigError, UnusableEnvironment

Location = Path | str           # str: an address with "://"
_READ_AHEAD = 8 << 20           # bytes of a remote file that a walk asks for at a time


class File(Protocol):
    """An open file that is read by position, so that several readers may share it.

    size: bytes. version: another number means that the file may have other content.
    """

    size: int
    version: int

    def read(self, size: int, offset: int) -> bytes:
        """`size` bytes from `offset` on; fewer only at the end of the file. Raises OSError."""
        ...


class _Local:
    """Holds its descriptor for as long as someone holds it."""

    descriptor = -1

    def __init__(self, path: Path) -> None:
        self.descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        status = os.fstat(self.descriptor)
        self.size, self.version = status.st_size, status.st_mtime_ns

    def read(self, size: int, offset: int) -> bytes:
        data = os.pread(self.descriptor, size, offset)
        while 0 < len(data) < size and (more := os.pread(self.descriptor, size - len(data), offset + len(data))):
            data += more            # one call gives at most 2 GiB, and a network disk less where it was interrupted
        return data

    def __del__(self) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)


class _Remote:
    def __init__(self, address: str, ahead: int) -> None:
        system, path = _system(address)
        with _told():
            self._file: Any = system.open(path, "rb", block_size=ahead or _READ_AHEAD,
                                          cache_type="readahead" if ahead else "none")
            self.size, self.version = _status(system, path)

    def read(self, size: int, offset: int) -> bytes:
        with _told():
            self._file.seek(min(offset, self.size))
            return bytes(self._file.read(max(0, min(size, self.size - offset))))


def is_remote(setting: str) -> bool:
    return "://" in setting


def located(setting: str) -> Location:
    return setting if is_remote(setting) else Path(setting).expanduser()


def beside(location: Location, suffix: str) -> Location:
    """The file of the same name and `suffix`."""
    return location + suffix if isinstance(location, str) else location.with_name(location.name + suffix)


def open_file(location: Location, ahead: int = _READ_AHEAD) -> File:
    """ahead: bytes of a remote file that are fetched beyond those asked for; 0 for who reads here and there. Raises
    OSError."""
    return _Remote(location, ahead) if isinstance(location, str) else _Local(location)


@contextmanager
def opened(location: Location) -> Iterator[File]:
    """A file for reading. Raises UnusableEnvironment where the system does not give one or stops reading."""
    try:
        yield open_file(location)
    except OSError as error:
        raise UnusableEnvironment(f"Cannot read {location} ({error.strerror or error}): check that the file is there, "
                                  "that you may read it, and that its disk is well.") from error


def status(location: Location) -> tuple[int, int]:
    """(size, version), without opening. Raises OSError."""
    if isinstance(location, Path):
        found = location.stat()
        return found.st_size, found.st_mtime_ns
    system, path = _system(location)
    with _told():
        return _status(system, path)


def shared_file(location: Location, size: int, version: int) -> File:
    """A file that this process keeps open for the next who asks. Raises OSError.

    size, version: of when the file was indexed; they tell one that was made anew under the same name from the old one.
    """
    # Connections do not survive a fork, descriptors do
    return _kept(location, size, version, os.getpid() if isinstance(location, str) else 0)


def let_go() -> None:
    """Whoever asks next for a shared file gets it opened anew."""
    _kept.cache_clear()


@lru_cache(maxsize=64)      # open files a process; reading from more shards than that opens them again
def _kept(location: Location, size: int, version: int, process: int) -> File:
    return open_file(location, ahead=0)


def matching(pattern: str) -> list[Location]:
    """The files that a pattern names, sorted; braces that do not pair are part of a name. Raises ForgeError."""
    return [path for path in named(pattern) if isinstance(path, str) or path.is_file()]


def named(pattern: str) -> list[Location]:
    """As `matching`, with links that lead nowhere."""
    found: set[Location] = set()
    for each in _patterns(pattern):
        if is_remote(each):
            found.update(_remote_matching(each))
        else:
            found.update(Path(name) for name in glob.glob(str(Path(each).expanduser())))
    return sorted(found, key=str)


def inside(folder: Location, ending: str, below: bool = False) -> list[Location] | None:
    """The files with that ending in a folder, or anywhere below it, sorted; None: it is no folder."""
    pattern = f"**/*{ending}" if below else f"*{ending}"
    if isinstance(folder, Path):
        return sorted(folder.glob(pattern)) if folder.is_dir() else None
    system, path = _system(folder)
    with _unusable(folder):
        if not system.isdir(path):
            return None
    return sorted(_remote_matching(f"{folder.rstrip('/')}/{pattern}"), key=str)


def _remote_matching(pattern: str) -> list[Location]:
    system, path = _system(pattern)
    with _unusable(pattern):
        return [str(system.unstrip_protocol(name)) for name in system.glob(path)]
    return []


def _patterns(braces: str) -> list[str]:
    """"{0..2}.tar" as three patterns."""
    from braceexpand import braceexpand

    try:
        return list(braceexpand(braces))
    except ValueError:
        return [braces]


def _system(address: str) -> tuple[Any, str]:
    """The file system of an address in this process, and the path there."""
    try:
        from fsspec.core import url_to_fs
    except ImportError as error:
        raise UnusableEnvironment(f"Reading {address} needs the package fsspec: pip install fsspec, and the package of "
                                  "that kind of storage (s3fs, gcsfs, ...).") from error
    try:
        system, path = url_to_fs(address)
    except ImportError as error:        # of the kind of storage
        raise UnusableEnvironment(f"Reading {address} needs another package ({error}).") from error
    except ValueError as error:
        raise ConfigError(f"{address} is no address that fsspec knows ({error}).") from error
    return system, str(path)


def _status(system: Any, path: str) -> tuple[int, int]:
    """(size, version), by one request."""
    found = system.info(path)
    said = repr(sorted((str(key), str(value)) for key, value in found.items()
                       if str(key).lower() in ("etag", "mtime", "lastmodified", "last_modified", "updated", "created",
                                               "generation", "md5hash", "size")))
    digest = hashlib.blake2b(said.encode(), digest_size=7).digest()
    return int(found["size"]), int.from_bytes(digest, "big")


@contextmanager
def _told() -> Iterator[None]:
    """Whatever a storage's own library raises, as OSError."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        raise OSError(f"{type(error).__name__}: {error}") from error


@contextmanager
def _unusable(address: str) -> Iterator[None]:
    try:
        with _told():
            yield
    except OSError as error:
        if not isinstance(error, FileNotFoundError):
            raise UnusableEnvironment(f"Cannot read {address} ({error.strerror or error}): check the address, that you "
                                      "may read it, and that it can be reached from here.") from error


def readable(location: Location) -> bool:
    with suppress(OSError):
        status(location)
        return True
    return False
