"""python -m forge.shards make|info|check: pack a folder of text, see what shards hold, and whether they are whole."""

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
    from forge.data.folder import Made, Making, Progress

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
"""
DAMAGED = Exit.CANNOT_JUDGE     # the answer of `check` where it found a fault
_SETTINGS: dict[str, Any] = {"pattern": "*.txt", "heldout": 0.05, "size_mb": 100.0, "overwrite": False}


def main(arguments: Sequence[str] | None = None) -> None:
    """Ends by SystemExit, as every command does."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if not arguments or {"-h", "--help"} & set(arguments):
        print(USAGE, end="", file=sys.stdout if arguments else sys.stderr)
        sys.exit(Exit.ANSWERED if arguments else Exit.USAGE)
    commands = {"make": _make, "info": _info, "check": _check}
    with reporting():
        if arguments[0] not in commands:
            raise ConfigError(f"forge.shards has no command {arguments[0]!r}.\n{USAGE.rstrip()}")
        sys.exit(commands[arguments[0]](arguments[1:]))


def _make(words: Sequence[str]) -> Exit:
    settings = [word for word in words if re.match(r"\w+=", word)]
    making = _making(settings)
    paths = [word for word in words if word not in settings]
    if len(paths) != 2:
        raise ConfigError(f"make wants a FOLDER and an OUT, and got: {' '.join(paths) or 'nothing'}.\n{USAGE.rstrip()}")
    folder, out = (Path(path).expanduser() for path in paths)

    from forge.data.folder import make_shards

    with _progress("packing") as progress:
        made = make_shards(folder, out, making, progress)
    _tell(made, out)
    return Exit.ANSWERED


def _making(words: list[str]) -> Making:
    from forge.data.folder import Making

    settings = dict(_SETTINGS)
    for word in words:
        name, _, value = word.partition("=")
        if name not in _SETTINGS:
            raise ConfigError(f"{name} is not a setting of make.{did_you_mean(name, list(_SETTINGS))} "
                              f"Its settings: {', '.join(_SETTINGS)}.")
        try:
            settings[name] = _truth(value) if name == "overwrite" else type(_SETTINGS[name])(value)
        except ValueError:
            raise ConfigError(f"{word}: {'true or false' if name == 'overwrite' else 'a number'} is wanted.") from None
    return Making(**settings)


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
