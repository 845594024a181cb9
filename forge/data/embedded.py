"""Sets of pictures that forge makes itself: rendered or unpacked once into shards in the cache folder."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from forge.data import Split
from forge.data.disk import cache_folder, made_once, writing
from forge.data.pack import Packed, pack_samples
from forge.errors import UnusableEnvironment
from forge.notes import say

SPLITS: tuple[Split, ...] = ("train", "heldout")
_FORMAT = 1                     # of the packed folder; another number makes the sets anew

Made = Callable[[Split], Iterable[Packed]]


def made_shards(cache: str | None, name: str, settings: dict[str, Any], shard_mb: int, made: Made) -> Path:
    """The folder whose train/ and heldout/ hold what `made` gives. It is made once for each name and settings, by one
    of several processes.

    Raises UnusableEnvironment where the disk does not take it.
    """
    told = json.dumps([_FORMAT, shard_mb, settings], sort_keys=True)
    folder = cache_folder(cache) / name / hashlib.blake2b(told.encode(), digest_size=8).hexdigest()
    with writing(folder, "set data.cache to another folder"):
        return made_once(folder, lambda making: _make(making, folder, shard_mb, made))


def conversation(question: str, answer: str, *more: tuple[str, str]) -> bytes:
    """The json field of a sample with one picture, which stands before the first question."""
    turns = [(f"<image>{question}", answer), *more]
    messages = [{"role": role, "content": said} for turn in turns
                for role, said in zip(("user", "assistant"), turn, strict=True)]
    return json.dumps({"messages": messages}).encode()


def _make(making: Path, folder: Path, shard_mb: int, made: Made) -> None:
    say(f"Making pictures once, in {folder}.")
    started = time.perf_counter()
    for split in SPLITS:
        if not pack_samples(made(split), making / split, shard_mb << 20):
            raise UnusableEnvironment(f"No picture falls to the {split} split: raise data.num_pictures, or set "
                                      "data.heldout nearer to a half.")
    say(f"Made in {time.perf_counter() - started:.1f} s.")
