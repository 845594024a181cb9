"""A user's folder of text as shards."""

from __future__ import annotations

import fnmatch
import os
import shutil
import stat
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from forge.data.disk import ANOTHER_OUT, require_space, writing
from forge.data.pack import chosen, pack, rank, refusal
from forge.errors import ConfigError

SPLITS = ("train", "heldout")
_AROUND_A_TEXT = 2048       # bytes of a shard and its index beside the text itself, at most, unless names are very long

Progress = Callable[[int, int], None]       # so many more bytes are done, of so many in all


@dataclass(frozen=True)
class Making:
    """What becomes of a folder.

    pattern: as in a shell, of the name of a file, or of its path below the folder where the pattern has a slash.
    heldout: the fraction of files that is held out; 0: none. A file's name alone decides, but where there are so few
        that chance would put all on one side.
    size_mb: text in a shard. overwrite: replace shards that are there.
    """

    pattern: str
    heldout: float
    size_mb: float
    overwrite: bool

    def require_sense(self) -> None:
        """Raises ConfigError."""
        if not 0 <= self.heldout < 1:
            raise ConfigError(f"heldout={self.heldout} is no fraction: it is 0, or less than 1.")
        if not 0 < self.size_mb < 1e9:
            raise ConfigError(f"size_mb={self.size_mb}: a shard holds some text and has an end, 100 for example.")


@dataclass(frozen=True)
class Made:
    """names: of the files that each split holds. left_out: how many files were not packed, for each reason."""

    names: dict[str, list[str]]
    left_out: Counter[str]

    def reasons(self) -> str:
        return ", ".join(f"{count} {reason}" for reason, count in self.left_out.most_common()) or "none"


def make_shards(folder: Path, out: Path, making: Making, progress: Progress) -> Made:
    """Pack the text files below `folder` into OUT/train and OUT/heldout, which appear once they are whole.

    Raises ConfigError and UnusableEnvironment; OUT is then as it was.
    """
    making.require_sense()
    if not folder.is_dir():
        raise ConfigError(f"{folder} is not a folder: name the folder that holds your text files.")
    _refuse_overwriting(out, making.overwrite)
    files, unreadable = _files(folder, out, making.pattern)
    if not files:
        raise ConfigError(f"{folder} has no files that match pattern='{making.pattern}': give another, for example "
                          "pattern='*.md'.")
    require_space(out, sum(size + _AROUND_A_TEXT for size in files.values()), ANOTHER_OUT)
    with writing(out, ANOTHER_OUT):
        out.mkdir(parents=True, exist_ok=True)
        hidden = Path(tempfile.mkdtemp(prefix=".making.", dir=out))
        try:
            made = _packed(folder, files, making, hidden, progress)
            for split in SPLITS:
                shutil.rmtree(out / split, ignore_errors=True)
                if made.names[split]:
                    (hidden / split).rename(out / split)
        finally:
            shutil.rmtree(hidden, ignore_errors=True)
            with suppress(OSError):
                out.rmdir()             # where nothing is in it
    return Made(made.names, made.left_out + unreadable)


def _refuse_overwriting(out: Path, overwrite: bool) -> None:
    if out.exists() and not out.is_dir():
        raise ConfigError(f"{out} is a file: name a folder for the shards.")
    there = [out / split for split in SPLITS if (out / split).exists()]
    if there and not overwrite:
        raise ConfigError(f"{there[0]} is there already: choose another OUT, or replace it with overwrite=true.")


def _files(folder: Path, out: Path, pattern: str) -> tuple[dict[str, int], Counter[str]]:
    """The sizes of the files that match, in the order of their names; and what cannot be read."""
    found: dict[str, int] = {}
    unreadable: Counter[str] = Counter()
    for place, subfolders, names in os.walk(folder, onerror=lambda _: unreadable.update(["unreadable folders"])):
        subfolders[:] = [name for name in subfolders if Path(place, name).absolute() != out.absolute()]
        for name in names:
            path = Path(place, name)
            below = path.relative_to(folder).as_posix()
            if not fnmatch.fnmatchcase(below if "/" in pattern else name, pattern):
                continue
            try:
                status = path.stat()
            except OSError:
                unreadable["unreadable"] += 1
                continue
            if stat.S_ISREG(status.st_mode):
                found[below] = status.st_size
            else:
                unreadable["no regular files"] += 1     # reading a pipe would wait for ever
    return dict(sorted(found.items())), unreadable


def _packed(folder: Path, files: dict[str, int], making: Making, hidden: Path, progress: Progress) -> Made:
    """Pack by the hash of each name; where that leaves a side without any text, once more with one text there."""
    held = {name for name in files if chosen(name, making.heldout)}
    made = _pack_split(folder, files, held, making, hidden, progress)
    whole = sorted(made.names["train"] + made.names["heldout"], key=rank)
    if not whole:
        raise ConfigError(f"None of the {len(files)} files that match in {folder} is text to train on: "
                          f"{made.reasons()}.")
    if making.heldout == 0 or all(made.names.values()):
        return made
    if len(whole) == 1:
        raise ConfigError(f"{folder} has a single text, {whole[0]!r}, so none can be held out: cut it into several "
                          f"(split -C 100k --additional-suffix=.txt FILE), or hold none out with heldout=0.")
    held = {whole[0]} if made.names["train"] else set(whole[:-1])
    return _pack_split(folder, files, held, making, hidden, progress)


def _pack_split(folder: Path, files: dict[str, int], held: set[str], making: Making, hidden: Path,
                progress: Progress) -> Made:
    made = Made({split: [] for split in SPLITS}, Counter())
    total = sum(files.values())
    for split in SPLITS:
        shutil.rmtree(hidden / split, ignore_errors=True)
        names = [name for name in files if (name in held) == (split == "heldout")]
        texts = _texts(folder, names, made, split, lambda done: progress(done, total))
        pack(texts, hidden / split, int(making.size_mb * 1e6))
    return made


def _texts(folder: Path, names: list[str], made: Made, split: str,
           done: Callable[[int], None]) -> Iterator[tuple[str, bytes]]:
    for name in names:
        try:
            text = (folder / name).read_bytes()
        except OSError:
            made.left_out["unreadable"] += 1
            continue
        if why := refusal(text):
            made.left_out[why] += 1
        else:
            made.names[split].append(name)
            yield name, text
        done(len(text))
