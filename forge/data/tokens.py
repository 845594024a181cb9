"""data=tokens: text that is token ids already."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from forge.data import Source, Split
from forge.data.disk import cache_folder
from forge.data.hashing import held_out
from forge.data.token_format import Layout, Width, layout_of
from forge.data.tokenizer import BYTES, open_tokenizer, vocabulary_problems
from forge.errors import ConfigError, UnreadableError
from forge.notes import say

if TYPE_CHECKING:
    from forge.config import Config
    from forge.data.token_scan import Scan

_MAKE = "`python -m forge.shards tokenize SHARDS OUT` makes them"


@dataclass(frozen=True)
class Tokens:
    """Files of token ids: forge's own, nanoGPT's and OLMo's bare numbers, llm.c's, and numpy's .npy.

    train, heldout: a file, a folder of .bin and .npy files, or a pattern.
    heldout_fraction: where heldout is None, the fraction of the documents in `train` that is held out. A document's ids
        alone decide, so copies are on one side.
    tokenizer: what made them, "bytes" or the path of a tokenizer.json: what the run needs to write text. None: it
        writes none.
    dtype: of files that do not say it themselves. end: the id that ends a document; None: as the sidecar says, or the
        tokenizer; where nothing says it, each file is one document.
    cache: folder for what is learnt by reading a file once; None: the user's cache folder.
    """

    train: str | None
    heldout: str | None
    heldout_fraction: float
    tokenizer: str | None
    dtype: Width | None
    end: int | None
    cache: str | None

    def open(self, split: Split) -> Source:
        from forge.data.token_files import TokenFiles  # here, because it imports torch

        own = split == "heldout" and self.heldout is not None
        setting, name = (self.heldout, "data.heldout") if own else (self.train, "data.train")
        layouts, scans = self._read(setting, name)
        kept = np.ones(sum(len(scan.ends) for scan in scans), bool)
        if self.heldout is None:
            kept = self._held_out(np.concatenate([scan.hashes for scan in scans])) == (split == "heldout")
        return TokenFiles(layouts, scans, kept)

    def problems(self, config: Config) -> Iterator[str]:
        if self.heldout is None and not 0 < self.heldout_fraction < 1:
            yield (f"data.heldout_fraction={self.heldout_fraction} is no fraction between 0 and 1: "
                   "set it to 0.05, or name files in data.heldout")
        if self.end is not None and self.end < 0:
            yield f"data.end={self.end}: an id is 0 or more; null takes the one that the files or the tokenizer name"
        if self.tokenizer is not None:
            yield from vocabulary_problems(self.tokenizer, config)
        for name, setting in {"data.train": self.train, "data.heldout": self.heldout}.items():
            if setting is None and name == "data.heldout":
                continue
            try:
                layouts, scans = self._read(setting, name)
            except (ConfigError, UnreadableError) as error:
                yield str(error)
                continue
            for layout, scan in zip(layouts, scans, strict=True):
                yield from _vocabulary(layout, scan, config.model.vocab_size)

    def _read(self, setting: str | None, name: str) -> tuple[list[Layout], list[Scan]]:
        """The files that hold anything. Raises ConfigError and UnreadableError."""
        from forge.data.token_scan import scanned

        found = token_paths(setting, name)
        layouts = [layout_of(path, self.dtype) for path in found]
        holding = [layout for layout in layouts if layout.count]
        if not holding:
            raise ConfigError(f"{name}={setting}: not one token in {len(found)} files: name others; {_MAKE}.")
        if len(holding) < len(layouts):
            say(f"{name}={setting}: {len(layouts) - len(holding)} of {len(layouts)} files hold no token.")
        return holding, [scanned(layout, self._end(layout), cache_folder(self.cache)) for layout in holding]

    def _end(self, layout: Layout) -> int | None:
        """Raises UnreadableError where the tokenizer is not the one that made the file."""
        sidecar = layout.sidecar
        if sidecar is not None and self.tokenizer is not None and sidecar.tokenizer != made_by(self.tokenizer):
            raise UnreadableError(f"{layout.path} was not made with data.tokenizer={self.tokenizer}, so its ids mean "
                                  f"other words: name the tokenizer that made it, or null.")
        if self.end is not None:
            return self.end
        if sidecar is not None:
            return sidecar.end
        if self.tokenizer is not None:
            return open_tokenizer(self.tokenizer).end
        say(f"Nothing says which token ends a document in {layout.path}: the file is one. Set data.end, or "
            f"data.tokenizer.")
        return None

    def _held_out(self, hashes: np.ndarray) -> np.ndarray:
        """[documents] bool, at least one of each."""
        if len(hashes) < 2:
            raise ConfigError(f"data.train={self.train} is a single document, so none can be held out: name other "
                              "files in data.heldout, or set data.end to the id that ends a document.")
        return held_out(hashes, self.heldout_fraction)


def made_by(tokenizer: str) -> str:
    """What a sidecar calls it."""
    if tokenizer == BYTES:
        return BYTES
    return hashlib.blake2b(open_tokenizer(tokenizer).files[0].read_bytes(), digest_size=16).hexdigest()


def token_paths(setting: str | None, name: str) -> list[Path]:
    """Raises ConfigError where a setting names no files."""
    if setting is None:
        raise ConfigError(f"{name} names no files of token ids: set it to a file, a folder or a pattern; {_MAKE}.")
    path = Path(setting).expanduser()
    if paths := _paths(path):
        return paths
    what = "holds no .bin or .npy files" if path.exists() else "does not exist"
    raise ConfigError(f"{name}={setting} {what}: name a file, a folder or a pattern of token files; {_MAKE}.")


def _vocabulary(layout: Layout, scan: Scan, vocab_size: int) -> Iterator[str]:
    """Ids that the model has no embedding for would end a run inside a kernel, far from the reason."""
    if scan.largest >= vocab_size:
        place = layout.offset + scan.at * np.dtype(layout.dtype).itemsize
        yield (f"{layout.path} holds the id {scan.largest} (token {scan.at:,}, byte {place:,}) and model.vocab_size="
               f"{vocab_size}: set model.vocab_size={scan.largest + 1} or more, or another data.dtype.")
    elif layout.sidecar is not None and layout.sidecar.vocab_size > vocab_size:
        yield (f"{layout.path} was made with a vocabulary of {layout.sidecar.vocab_size} and model.vocab_size="
               f"{vocab_size}: set model.vocab_size={layout.sidecar.vocab_size}.")


def _paths(setting: Path) -> list[Path]:
    """The .bin and .npy files that a folder holds; or what a pattern or name stands for. Sorted."""
    if setting.is_dir():
        return sorted(path for path in setting.iterdir() if path.suffix in (".bin", ".npy") and path.is_file())
    if setting.is_file():
        return [setting]
    there = Path(setting.anchor) if setting.is_absolute() else Path()
    pattern = str(setting.relative_to(setting.anchor)) if setting.is_absolute() else str(setting)
    return sorted(path for path in there.glob(pattern) if path.is_file())
