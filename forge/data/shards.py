"""data=shards: text in WebDataset tar shards."""

from __future__ import annotations

import glob
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from forge.data import Source, Split
from forge.data.disk import cache_folder
from forge.data.texts import Texts, open_texts
from forge.data.tokenizer import open_tokenizer, vocabulary_problems
from forge.errors import ConfigError

if TYPE_CHECKING:
    from forge.config import Config


@dataclass(frozen=True)
class Shards:
    """Text shards from local or mounted folders.

    train, heldout: a folder of .tar files, or a pattern ("data/{000..041}.tar", "data/*.tar").
    heldout_fraction: where heldout is None, the fraction of the samples in `train` that is held out. A sample's
        content alone decides, so the copies of a text are on one side.
    tokenizer: "bytes", or the path of a tokenizer.json.
    text_field: the field of a sample that holds its text.
    cache: folder for what is derived from shards (token ids; indices of shards in folders that cannot be written);
        None: the user's cache folder.
    """

    train: str | None
    heldout: str | None
    heldout_fraction: float
    tokenizer: str
    text_field: str
    cache: str | None

    def open(self, split: Split) -> Source:
        from forge.data.source import open_source  # here, because it imports torch

        tokenizer = open_tokenizer(self.tokenizer)
        cache = cache_folder(self.cache)
        if split == "heldout" and self.heldout is not None:
            texts = open_texts(shard_paths(self.heldout, "data.heldout"), self.text_field, cache)
        else:
            texts = open_texts(shard_paths(self.train, "data.train"), self.text_field, cache)
            if self.heldout is None:
                texts = texts.selected(self._held_out(texts) == (split == "heldout"))
        return open_source(texts, tokenizer, cache)

    def problems(self, config: Config) -> Iterator[str]:
        settings = {"data.train": self.train} | ({"data.heldout": self.heldout} if self.heldout is not None else {})
        for name, value in settings.items():
            try:
                shard_paths(value, name)
            except ConfigError as error:
                yield str(error)
        if self.heldout is None and not 0 < self.heldout_fraction < 1:
            yield (f"data.heldout_fraction={self.heldout_fraction} is no fraction between 0 and 1: "
                   "set it to 0.05, or name shards in data.heldout")
        yield from vocabulary_problems(self.tokenizer, config)

    def _held_out(self, texts: Texts) -> np.ndarray:
        """[samples] bool, at least one of each."""
        if len(texts) < 2:
            raise ConfigError(f"data.train={self.train} has a single sample, so none can be held out: "
                              "name other shards in data.heldout.")
        # splitmix64 of checksum and size: neighbours in either land far apart
        mixed = texts.checksums.astype(np.uint64) << np.uint64(32) | texts.sizes.astype(np.uint64)
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            mixed = (mixed ^ mixed >> np.uint64(shift)) * np.uint64(factor)
        held = mixed < np.uint64(int(self.heldout_fraction * 2**64))
        if held.all() or not held.any():
            held[:] = held[0]
            held[np.argmin(mixed)] = not held[0]
        return held


def shard_paths(setting: str | None, name: str) -> list[Path]:
    """The shards that a folder or pattern names, sorted. Raises ConfigError where there are none."""
    if setting is None:
        raise ConfigError(f"{name} names no shards: set it to a folder of .tar files; "
                          "`python -m forge.shards make FOLDER OUT` makes them from a folder of text.")
    path = Path(setting).expanduser()
    if path.is_dir():
        paths = sorted(path.glob("*.tar"))
    else:
        paths = sorted({Path(found) for pattern in _patterns(str(path))
                        for found in glob.glob(pattern) if Path(found).is_file()})
    if paths:
        return paths
    if (path / "train").is_dir():
        raise ConfigError(f"{name}={setting} holds no .tar files, but folders: set data.train={path / 'train'} "
                          f"and data.heldout={path / 'heldout'}.")
    what = "holds no .tar files" if path.exists() else "does not exist"
    raise ConfigError(f"{name}={setting} {what}: name a folder or pattern of shards; "
                      "`python -m forge.shards make FOLDER OUT` makes them from a folder of text.")


def _patterns(braces: str) -> list[str]:
    """"{0..2}.tar" as three patterns; braces that do not pair are part of a name."""
    from braceexpand import braceexpand

    try:
        return list(braceexpand(braces))
    except ValueError:
        return [braces]
