"""data=source_text: real text that is on every machine."""

from __future__ import annotations

import hashlib
import os
import platform
import sysconfig
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from forge.data import Source, Split
from forge.data.disk import cache_folder, made_once, writing
from forge.data.pack import FIELD, chosen, pack, refusal
from forge.data.texts import open_texts
from forge.data.tokenizer import open_tokenizer, vocabulary_problems
from forge.errors import UnreadableError, UnusableEnvironment
from forge.notes import say

if TYPE_CHECKING:
    from forge.config import Config

_FORMAT = 1                     # of the packed folder; another number packs anew
_FOREIGN = ("site-packages", "dist-packages", "__pycache__")
_BROKEN_ON_PURPOSE = "lib2to3/tests/data/"      # inputs of a parser's tests: Python 2, odd line ends


@dataclass(frozen=True)
class SourceText:
    """The Python files of this interpreter's own standard library, packed once into shards.

    tokenizer: "bytes", or the path of a tokenizer.json.
    cache: folder for the shards; None: the user's cache folder.
    heldout: the fraction of files that is held out. A file's name alone decides, so it is the same on any machine.
    shard_mb: text in a shard.
    """

    tokenizer: str
    cache: str | None
    heldout: float
    shard_mb: int

    def open(self, split: Split) -> Source:
        from forge.data.source import open_source  # here, because it imports torch

        tokenizer = open_tokenizer(self.tokenizer)
        cache = cache_folder(self.cache)
        library = Path(sysconfig.get_path("stdlib"))
        files = _python_files(library)
        folder = cache / "source_text" / f"{platform.python_version()}-{self._key(library, files)}"
        with writing(cache, "set data.cache to another folder"):
            made_once(folder, lambda making: self._pack(library, files, making))
        shards = sorted((folder / split).glob("*.tar"))
        if not shards:
            raise UnusableEnvironment(f"{folder} holds no {split} shards: delete it, and it is packed again.")
        try:
            return open_source(open_texts(shards, FIELD, cache), tokenizer, cache)
        except UnreadableError as error:
            raise UnreadableError(f"{error} To have it made again, delete {folder}.") from None

    def problems(self, config: Config) -> Iterator[str]:
        if not 0 < self.heldout < 1:
            yield f"data.heldout={self.heldout} is no fraction between 0 and 1: set it to 0.08, for example"
        if self.shard_mb < 1:
            yield f"data.shard_mb={self.shard_mb} is less than 1: set it to 8, for example"
        yield from vocabulary_problems(self.tokenizer, config)

    def _key(self, library: Path, files: list[str]) -> str:
        """Tells one interpreter's files from another's without reading them, so that opening takes no time."""
        digest = hashlib.blake2b(f"{_FORMAT} {self.heldout} {self.shard_mb}".encode(), digest_size=8)
        for name in files:
            with suppress(OSError):     # a link that leads nowhere
                stat = (library / name).stat()
                digest.update(f"{name}\0{stat.st_size}\0{stat.st_mtime_ns}\0".encode("utf-8", "surrogateescape"))
        return digest.hexdigest()

    def _pack(self, library: Path, files: list[str], folder: Path) -> None:
        say(f"Packing the standard library of Python {platform.python_version()} ({len(files)} files) once, into "
            f"{folder.parent}.")
        started = time.perf_counter()
        for split, held in (("train", False), ("heldout", True)):
            names = [name for name in files if chosen(name, self.heldout) == held]
            pack(_texts(library, names), folder / split, self.shard_mb << 20)
        say(f"Packed in {time.perf_counter() - started:.1f} s.")


def _python_files(library: Path) -> list[str]:
    """The names of the .py files below `library`, relative to it, sorted."""
    found = []
    for folder, subfolders, names in os.walk(library):
        subfolders[:] = [name for name in subfolders if name not in _FOREIGN]
        below = os.path.relpath(folder, library).replace(os.sep, "/")
        found += [name if below == "." else f"{below}/{name}" for name in names if name.endswith(".py")]
    if not found:
        raise UnusableEnvironment(f"{library} holds no Python files (this interpreter keeps its library elsewhere): "
                                  "use data=shards with text of your own.")
    return sorted(name for name in found if not name.startswith(_BROKEN_ON_PURPOSE))


def _texts(library: Path, names: list[str]) -> Iterator[tuple[str, bytes]]:
    for name in names:
        with suppress(OSError):     # a file that only root may read
            text = (library / name).read_bytes()
            if refusal(text) is None:
                yield name, text
