"""python -m forge.shards make|info|check|tokenize: pack a folder of text, see what shards hold and whether they are
whole, and make token ids of them."""

from __future__ import annotations

import glob
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forge.errors import ConfigError, Exit, ForgeError
from forge.schema import did_you_mean
from forge.words import reporting

if TYPE_CHECKING:
    from forge.data.folder import Made, Progress

USAGE = """\
python -m forge.shards make FOLDER OUT [SETTING=VALUE ...]
    Pack the text files in FOLDER and below into shards in OUT/train and OUT/heldout.
    pattern='*.txt'     which files: a pattern of their names, or of their paths below FOLDER if it has a /
    heldout=0.05        the fraction of files that is held out; the name of a file decides
    size_mb=100         text in a shard, in MB
    overwrite=false     true: replace the shards in OUT
python -m forge.shards info PATH...
    What the shards hold. PATH is a shard, a folder with shards anywhere below it, or a pattern.
python -m forge.shards check PATH...
    Read every byte of the shards; a line for each fault, and exit code 4 if there is one.
python -m forge.shards tokenize SHARDS OUT tokenizer=FILE [SETTING=VALUE ...]
    Make files of token ids, for data=tokens: OUT/tokens.bin, or train.bin and heldout.bin where SHARDS holds folders
    of these names.
    tokenizer=FILE      a tokenizer.json, or bytes
    field=txt           the field of a sample that holds its text
    overwrite=false     true: replace the files in OUT
"""
DAMAGED = Exit.CANNOT_JUDGE     # the answer of `check` where it found a fault
_SETTINGS: dict[str, Any] = {"pattern": "*.txt", "heldout": 0.05, "size_mb": 100.0, "overwrite": False}
_TOKENIZING: dict[str, Any] = {"tokenizer": "", "field": "txt", "overwrite": False}


def main(arguments: Sequence[str] | None = None) -> None:
    """Ends by SystemExit, as every command does."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if not arguments or {"-h", "--help"} & set(arguments):
        print(USAGE, end="", file=sys.stdout if arguments else sys.stderr)
        sys.exit(Exit.ANSWERED if arguments else Exit.USAGE)
    commands = {"make": _make, "info": _info, "check": _check, "tokenize": _tokenize}
    with reporting():
        if arguments[0] not in commands:
            raise ConfigError(f"forge.shards has no command {arguments[0]!r}.\n{USAGE.rstrip()}")
        sys.exit(commands[arguments[0]](arguments[1:]))


def _make(words: Sequence[str]) -> Exit:
    from forge.data.folder import Making, make_shards

    folder, out, settings = _asked("make", "a FOLDER", words, _SETTINGS)
    making = Making(**settings)
    with _progress("packing") as progress:
        made = make_shards(folder, out, making, progress)
    _tell(made, out)
    return Exit.ANSWERED


def _asked(command: str, first: str, words: Sequence[str], known: dict[str, Any]) -> tuple[Path, Path, dict[str, Any]]:
    """(FOLDER or SHARDS, OUT, settings). Raises ConfigError."""
    typed = [word for word in words if re.match(r"\w+=", word)]
    settings = dict(known)
    for word in typed:
        name, _, value = word.partition("=")
        if name not in known:
            raise ConfigError(f"{name} is not a setting of {command}.{did_you_mean(name, list(known))} "
                              f"Its settings: {', '.join(known)}.")
        try:
            settings[name] = _truth(value) if name == "overwrite" else type(known[name])(value)
        except ValueError:
            raise ConfigError(f"{word}: {'true or false' if name == 'overwrite' else 'a number'} is wanted.") from None
    paths = [word for word in words if word not in typed]
    if len(paths) != 2:
        raise ConfigError(f"{command} wants {first} and an OUT, and got: {' '.join(paths) or 'nothing'}.\n"
                          f"{USAGE.rstrip()}")
    return Path(paths[0]).expanduser(), Path(paths[1]).expanduser(), settings


def _truth(word: str) -> bool:
    if word.lower() not in ("true", "false"):
        raise ValueError(word)
    return word.lower() == "true"


def _tell(made: Made, out: Path) -> None:
    for split, names in made.names.items():
        if names:
            shards = list((out / split).glob("*.tar"))
            size = sum(shard.stat().st_size for shard in shards)
            print(f"{out / split}: {len(names):,} texts in {len(shards):,} shards, {_written(size)}")
    if made.left_out:
        print(f"left out: {made.reasons()}")
    held = f" data.heldout={out / 'heldout'}" if made.names["heldout"] else ""
    print(f"train on them: python -m forge.train data=shards data.train={out / 'train'}{held}")


def _tokenize(words: Sequence[str]) -> Exit:
    from forge.data.tokenise import tokenise

    source, out, asked = _asked("tokenize", "SHARDS", words, _TOKENIZING)
    if not asked["tokenizer"]:
        raise ConfigError(f"tokenize wants tokenizer=FILE, a tokenizer.json, or tokenizer=bytes.\n{USAGE.rstrip()}")
    splits = {split: [source / split] for split in ("train", "heldout") if (source / split).is_dir()}
    for name, folders in (splits or {"tokens": [source]}).items():
        made = tokenise(_shards(list(map(str, folders))), asked["field"], asked["tokenizer"], out / f"{name}.bin",
                        asked["overwrite"])
        print(f"{out / name}.bin: {made.documents:,} documents, {made.tokens:,} tokens of {made.dtype}")
    files = [f"data.{split}={out / split}.bin" for split in splits] or [f"data.train={out / 'tokens'}.bin"]
    print(f"train on them: python -m forge.train data=tokens {' '.join(files)} data.tokenizer={asked['tokenizer']} "
          f"model.vocab_size={made.vocab_size}")
    return Exit.ANSWERED


def _info(words: Sequence[str]) -> Exit:
    import numpy as np

    from forge.data.inspection import holding

    held = holding(_shards(words))
    print(f"shards   {held.num_shards:,}, {_written(held.num_bytes)}")
    print(f"samples  {held.num_samples:,}")
    for field, sizes in held.sizes.items():
        least, median, most_of, most = np.quantile(sizes, [0, 0.5, 0.9, 1], method="nearest").tolist()
        print(f"{field:<8} in {len(sizes):,} samples, {_written(sizes.sum())}; bytes in one: least {least:,}, "
              f"median {median:,}, mean {sizes.mean():,.0f}, 90 % up to {most_of:,}, most {most:,}")
    return Exit.ANSWERED


def _written(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:,.1f} MB" if num_bytes >= 1e5 else f"{num_bytes:,} bytes"


def _check(words: Sequence[str]) -> Exit:
    from forge.data.disk import cache_folder
    from forge.data.index import described, kept_index
    from forge.data.inspection import faults

    shards, cache = _shards(words), cache_folder(None)
    sizes = {path: path.stat().st_size if path.exists() else 0 for path in shards}
    num_faults = num_damaged = 0
    with _progress("checking") as progress:
        for path in shards:
            before = num_faults
            try:
                for fault in faults(path, cache):
                    print(f"{'note: ' if fault.harmless else ''}{described(path, fault)}")
                    num_faults += not fault.harmless
            except ForgeError as error:     # one file that cannot be opened hides no other
                print(error)
                num_faults += 1
            num_damaged += num_faults > before
            progress(sizes[path], sum(sizes.values()))
    answer = f"{num_faults:,} faults in {num_damaged:,} of them" if num_faults else "sound"
    print(f"{len(shards):,} shards: {answer}")
    if unindexed := sum(kept_index(path, cache) is None for path in shards):
        print(f"{unindexed:,} of them have no index with checksums, so only their structure was checked")
    return DAMAGED if num_faults else Exit.ANSWERED


def _shards(words: Sequence[str]) -> list[Path]:
    """The shards that the words name. Raises ConfigError where one names none."""
    if not words:
        raise ConfigError(f"Name a shard, or a folder of shards.\n{USAGE.rstrip()}")
    found: list[Path] = []
    for word in words:
        path = Path(word).expanduser()
        paths = sorted(path.rglob("*.tar")) if path.is_dir() else [Path(name) for name in sorted(glob.glob(str(path)))]
        if not paths:
            raise ConfigError(f"{word} {'holds no .tar files' if path.is_dir() else 'does not exist'}; "
                              "`python -m forge.shards make FOLDER OUT` makes shards from a folder of text.")
        found += paths
    return list(dict.fromkeys(found))


@contextmanager
def _progress(what: str) -> Iterator[Progress]:
    """A bar on the terminal, for what takes longer than a moment; elsewhere nothing."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (TextColumn(what), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    bar = Progress(*columns, console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty())
    with bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, advance=done, total=total)


if __name__ == "__main__":
    main()
