"""python -m forge.shards make|index|info|check|tokenize|look: pack a folder of text, index shards, see what they hold
and whether they are whole, make token ids of them, and look at their pictures."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forge.data.storage import Location, inside, located, named, status
from forge.errors import ConfigError, Exit, ForgeError, UnusableEnvironment
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
python -m forge.shards index PATH...
    Read the shards once and write the index of each beside it: places, checksums, text lengths, picture sizes.
    PATH is a shard, a folder with shards anywhere below it, a pattern, or an address that fsspec opens.
python -m forge.shards info PATH...
    What the shards hold.
python -m forge.shards check PATH...
    Read every byte of the shards. A line for each fault (file, byte, reason), and exit code 3 if there is one.
python -m forge.shards tokenize SHARDS OUT tokenizer=FILE [SETTING=VALUE ...]
    Make files of token ids, for data=tokens: OUT/tokens.bin, or train.bin and heldout.bin where SHARDS holds folders
    of these names.
    tokenizer=FILE      a tokenizer.json, or bytes
    field=txt           the field of a sample that holds its text
    overwrite=false     true: replace the files in OUT
python -m forge.shards look SHARDS OUT.png [SETTING=VALUE ...] [augment.SETTING=VALUE ...]
    A sheet of pictures with their captions: each as it is above, and as augment=gpu makes it below.
    samples=12          how many; draws=3 augmented ones of each, size=160 pixels, drawn from seed=0
    pictures, text      the fields that hold them, for example pictures=jpg
"""
DAMAGED = Exit.ASSERTION_FAILED     # the answer of `check` where it found a fault
_SETTINGS: dict[str, Any] = {"pattern": "*.txt", "heldout": 0.05, "size_mb": 100.0, "overwrite": False}
_TOKENIZING: dict[str, Any] = {"tokenizer": "", "field": "txt", "overwrite": False}


def main(arguments: Sequence[str] | None = None) -> None:
    """Ends by SystemExit, as every command does."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if not arguments or {"-h", "--help"} & set(arguments):
        print(USAGE, end="", file=sys.stdout if arguments else sys.stderr)
        sys.exit(Exit.ANSWERED if arguments else Exit.USAGE)
    commands = {"make": _make, "index": _index, "info": _info, "check": _check, "tokenize": _tokenize,
                "look": _look}
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


def _look(words: Sequence[str]) -> Exit:
    from forge.data.sheet import SETTINGS, make_sheet

    changes = [word for word in words if word.startswith("augment.")]
    source, out, asked = _asked("look", "SHARDS", [word for word in words if word not in changes], dict(SETTINGS))
    print(f"{out}: {make_sheet(_shards([str(source)]), out, asked, changes)} pictures")
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


def _index(words: Sequence[str]) -> Exit:
    from forge.data.disk import cache_folder
    from forge.data.index import keep, make_index

    shards, cache = _shards(words), cache_folder(None)
    sizes = _sizes(shards)
    num_members = num_faults = 0
    with _progress("indexing") as progress:
        for path in shards:
            index = make_index(path)
            if keep(index, cache) is None:
                raise UnusableEnvironment(f"Cannot write the index of {path}, neither beside it nor in {cache}: set "
                                          "XDG_CACHE_HOME to a folder that you may write.")
            num_members += len(index.names)
            num_faults += sum(not fault.harmless for fault in index.faults)
            progress(sizes[path], sum(sizes.values()))
    print(f"{len(shards):,} shards with {num_members:,} members: indexed")
    if num_faults:
        print(f"{num_faults:,} faults in them: `python -m forge.shards check` lists them")
    return Exit.ANSWERED


def _check(words: Sequence[str]) -> Exit:
    """Faults go to stdout, one a line; what is no fault, and the sum, to stderr."""
    from forge.data.disk import cache_folder
    from forge.data.index import described, kept_index
    from forge.data.inspection import faults

    shards, cache = _shards(words), cache_folder(None)
    sizes = _sizes(shards)
    num_faults = num_damaged = 0
    with _progress("checking") as progress:
        for path in shards:
            before = num_faults
            try:
                for fault in faults(path, cache):
                    print(f"{'note: ' if fault.harmless else ''}{described(path, fault)}",
                          file=sys.stderr if fault.harmless else sys.stdout)
                    num_faults += not fault.harmless
            except ForgeError as error:     # one file that cannot be opened hides no other
                print(f"{path}, byte 0: {error}")
                num_faults += 1
            num_damaged += num_faults > before
            progress(sizes[path], sum(sizes.values()))
    answer = f"{num_faults:,} faults in {num_damaged:,} of them" if num_faults else "sound"
    print(f"{len(shards):,} shards: {answer}", file=sys.stderr)
    if unindexed := sum(kept_index(path, cache) is None for path in shards):
        print(f"{unindexed:,} of them have no index with checksums, so only their structure was checked",
              file=sys.stderr)
    return DAMAGED if num_faults else Exit.ANSWERED


def _sizes(shards: Sequence[Location]) -> dict[Location, int]:
    """Bytes of each; 0 of what cannot be read."""
    sizes = {}
    for path in shards:
        with suppress(OSError):
            sizes[path] = status(path)[0]
    return {path: sizes.get(path, 0) for path in shards}


def _shards(words: Sequence[str]) -> list[Location]:
    """The shards that the words name. Raises ConfigError where one names none."""
    if not words:
        raise ConfigError(f"Name a shard, or a folder of shards.\n{USAGE.rstrip()}")
    found: list[Location] = []
    for word in words:
        folder = inside(located(word), ".tar", below=True)
        paths: list[Location] = named(word) if folder is None else folder
        if not paths:
            raise ConfigError(f"{word} {'does not exist' if folder is None else 'holds no .tar files'}; "
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
