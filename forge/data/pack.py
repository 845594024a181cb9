"""Writing samples as WebDataset tar shards: the same samples give the same bytes on any machine."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import IO

from forge.data.index import make_index, save
from forge.data.naming import is_meta

FIELD = "txt"       # the field under which a text is packed
Packed = tuple[str, Mapping[str, bytes]]


def pack(texts: Iterable[tuple[str, bytes]], folder: Path, shard_bytes: int) -> list[Path]:
    """Write (name, text) pairs as samples of one field. See pack_samples."""
    return pack_samples(((key, {FIELD: text}) for key, text in _with_keys(texts)), folder, shard_bytes)


def pack_samples(samples: Iterable[Packed], folder: Path, shard_bytes: int) -> list[Path]:
    """Write (key, {field: data}) pairs to folder/000000.tar and so on, each with its index. Returns the shards.

    A key is its sample's own, and has no dot in its last part. A shard is closed once it holds shard_bytes of data.
    Raises OSError where the disk does not take it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    left = iter(samples)
    shards: list[Path] = []
    for first in left:          # a shard takes its other samples from the same iterator
        shards.append(folder / f"{len(shards):06}.tar")
        _write_shard(shards[-1], chain([first], left), shard_bytes)
        save(make_index(shards[-1]), shards[-1].with_name(shards[-1].name + ".index"))
    return shards


def _write_shard(path: Path, samples: Iterable[Packed], shard_bytes: int) -> None:
    from webdataset import TarWriter  # here, because it imports torch

    # By way of memory: on a full disk, tarfile would write once more when it is thrown away, and print that it cannot
    held = io.BytesIO()
    writer = TarWriter(held, user="forge", group="forge", mode=0o644, mtime=0, encoder=False)
    num_bytes = 0
    with open(path, "wb") as file:
        for key, fields in samples:
            writer.write({"__key__": key, **fields})
            _move(held, file)
            num_bytes += sum(map(len, fields.values()))
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
