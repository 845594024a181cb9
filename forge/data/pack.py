"""Writing texts as WebDataset tar shards: the same texts give the same bytes on any machine."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from forge.data.index import make_index, save
from forge.data.texts import is_meta

FIELD = "txt"       # the field under which a text is packed


def pack(texts: Iterable[tuple[str, bytes]], folder: Path, shard_bytes: int) -> list[Path]:
    """Write (name, text) pairs to folder/000000.tar and so on, each with its index. Returns the shards.

    A shard is closed once it holds shard_bytes of text. Raises OSError where the disk does not take it.
    """
    from webdataset import TarWriter  # here, because it imports torch

    pairs = _with_keys(texts)
    shards: list[Path] = []
    folder.mkdir(parents=True, exist_ok=True)
    sample = next(pairs, None)
    while sample is not None:
        shards.append(folder / f"{len(shards):06}.tar")
        num_bytes = 0
        with open(shards[-1], "wb") as file:
            writer = TarWriter(file, user="forge", group="forge", mode=0o644, mtime=0, encoder=False)
            while sample is not None and num_bytes < shard_bytes:
                key, text = sample
                writer.write({"__key__": key, FIELD: text})
                num_bytes += len(text)
                sample = next(pairs, None)
            writer.close()
        save(make_index(shards[-1]), shards[-1].with_name(shards[-1].name + ".index"))
    return shards


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
