"""Writing texts as WebDataset tar shards: the same texts give the same bytes on any machine."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import IO

from forge.data.index import make_index, save
from forge.data.naming import is_meta

FIELD = "txt"       # the field under which a text is packed


def pack(texts: Iterable[tuple[str, bytes]], folder: Path, shard_bytes: int) -> list[Path]:
    """Write (name, text) pairs to folder/000000.tar and so on, each with its index. Returns the shards.

    A shard is closed once it holds shard_bytes of text. Raises OSError where the disk does not take it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    samples = _with_keys(texts)
    shards: list[Path] = []
    for first in samples:       # a shard takes its other samples from the same iterator
        shards.append(folder / f"{len(shards):06}.tar")
        _write_shard(shards[-1], chain([first], samples), shard_bytes)
        save(make_index(shards[-1]), shards[-1].with_name(shards[-1].name + ".index"))
    return shards


def _write_shard(path: Path, samples: Iterable[tuple[str, bytes]], shard_bytes: int) -> None:
    from webdataset import TarWriter  # here, because it imports torch

    # By way of memory: on a full disk, tarfile would write once more when it is thrown away, and print that it cannot
    held = io.BytesIO()
    writer = TarWriter(held, user="forge", group="forge", mode=0o644, mtime=0, encoder=False)
    num_bytes = 0
    with open(path, "wb") as file:
        for key, text in samples:
            writer.write({"__key__": key, FIELD: text})
            _move(held, file)
            num_bytes += len(text)
            if num_bytes >= shard_bytes:
                break
        writer.close()
        _move(held, file)


def _move(held: io.BytesIO, file: IO[bytes]) -> None:
    file.write(held.getvalue())
    held.seek(0)
    held.truncate()


def refusal(text: bytes) -> str | None:
    """Why a file is no text to train on; None: it is."""
    if not text:
        return "empty"
    if b"\0" in text:
        return "holds zero bytes (UTF-16, or no text)"
    with suppress(UnicodeDecodeError):
        text.decode("utf-8")
        return None
    return "not UTF-8"


def chosen(name: str, fraction: float) -> bool:
    """Whether a name belongs to the held-out part: for ever, whatever else is there."""
    return rank(name) < fraction


def rank(name: str) -> float:
    """A number in [0, 1) that the name alone decides."""
    value = hashlib.blake2b(name.encode("utf-8", "surrogateescape"), digest_size=6).digest()
    return int.from_bytes(value, "big") / (1 << 48)


def _with_keys(texts: Iterable[tuple[str, bytes]]) -> Iterator[tuple[str, bytes]]:
    """The path of a file as a key of its own: one without dots in its last part, where a key would end."""
    seen: set[str] = set()
    for name, text in texts:
        folder, slash, last = name.encode("utf-8", "backslashreplace").decode().rpartition("/")
        key = folder + slash + last.replace(".", "_")
        if is_meta(key):
            key = f"-{key}"
        while key in seen:
            key += "~"
        seen.add(key)
        yield key, text
