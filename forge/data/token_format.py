"""What a file of token ids holds: which numbers, from which byte on, by what the file says about itself."""

from __future__ import annotations

import io
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from forge.data.disk import replacing
from forge.errors import UnreadableError

Width = Literal["uint8", "uint16", "uint32"]        # of an id
SIDECAR = ".json"                                   # beside x.bin: x.bin.json
_FORMAT, _VERSION = "forge.tokens", 1
_NPY = b"\x93NUMPY"
# Karpathy's llm.c: 256 int32 numbers, the first three a magic number, a version and the count of ids.
_LLMC_HEADER = 1024
_LLMC = {(20240520, 1): "<u2", (20240801, 7): "<u4"}


@dataclass(frozen=True)
class Sidecar:
    """What `forge.shards tokenize` knows of a file. checksum: blake2b of its bytes, 128 bits. tokenizer: "bytes", or
    the blake2b of the tokenizer.json."""

    dtype: Width
    tokens: int
    documents: int
    vocab_size: int
    end: int
    tokenizer: str
    checksum: str


@dataclass(frozen=True)
class Layout:
    """dtype: numpy's name, with its order of bytes. offset: bytes before the first id. size, mtime_ns: of the file."""

    path: Path
    dtype: str
    offset: int
    count: int
    size: int
    mtime_ns: int
    sidecar: Sidecar | None


def layout_of(path: Path, stated: Width | None) -> Layout:
    """Which ids lie where. stated: what the user says about files that say nothing. Raises UnreadableError where a file
    contradicts itself or the user, or where nothing says what it holds."""
    try:
        with open(path, "rb") as file:
            status, head = os.fstat(file.fileno()), file.read(_LLMC_HEADER)
    except OSError as error:
        raise UnreadableError(f"{path} cannot be read ({error.strerror}).") from None
    sidecar = read_sidecar(path)
    said, offset, count = _said(path, head, status.st_size)
    if sidecar is not None:
        said, count = np.dtype(sidecar.dtype).newbyteorder("<").str, sidecar.tokens
    if said is None:
        if stated is None and status.st_size:
            raise UnreadableError(f"{path} is bare numbers, and nothing beside it says of which size: set data.dtype="
                                  f"uint16 (nanoGPT, OLMo with vocabularies up to 65,536) or data.dtype=uint32.")
        said = np.dtype(stated or "uint8").newbyteorder("<").str
    elif stated is not None and np.dtype(said).itemsize != np.dtype(stated).itemsize:
        raise UnreadableError(f"{path} says itself that its ids are {np.dtype(said).name}, and data.dtype={stated}: "
                              f"set data.dtype=null.")
    return Layout(path, said, offset, _count(path, said, offset, count, status.st_size), status.st_size,
                  status.st_mtime_ns, sidecar)


def _said(path: Path, head: bytes, size: int) -> tuple[str | None, int, int | None]:
    """(dtype, offset, count) by the file's own header; None where it has none."""
    if head.startswith(_NPY):
        return _of_npy(path, head)
    magic, version, count = np.frombuffer(head[:12].ljust(12, b"\0"), "<i4").tolist()
    if magic not in {known for known, _ in _LLMC}:
        return None, 0, None
    if (magic, version) not in _LLMC or len(head) < _LLMC_HEADER:
        raise UnreadableError(f"{path} begins as a file of llm.c, and is cut short or of version {version}, which is "
                              f"not known here.")
    return _LLMC[magic, version], _LLMC_HEADER, count


def _of_npy(path: Path, head: bytes) -> tuple[str, int, int]:
    file = io.BytesIO(head)
    try:
        version = np.lib.format.read_magic(file)
        if version == (1, 0):
            shape, _, dtype = np.lib.format.read_array_header_1_0(file)
        else:
            shape, _, dtype = np.lib.format.read_array_header_2_0(file)
    except ValueError as error:
        raise UnreadableError(f"{path} has no sound .npy header ({error}).") from None
    if len(shape) != 1 or dtype.kind not in "ui":
        raise UnreadableError(f"{path} holds {dtype} of shape {shape}: one row of whole numbers is wanted.")
    return dtype.str, file.tell(), int(shape[0])


def _count(path: Path, dtype: str, offset: int, said: int | None, size: int) -> int:
    """How many ids there are. Raises UnreadableError where the size of the file does not bear it out."""
    each, rest = np.dtype(dtype).itemsize, size - offset
    if said is not None and rest != said * each:
        raise UnreadableError(f"{path} should hold {said:,} ids of {np.dtype(dtype).name}, which is "
                              f"{offset + said * each:,} bytes, and has {size:,}: it was cut short, or something was "
                              f"added.")
    if rest % each:
        raise UnreadableError(f"{path} has {size:,} bytes, which is no whole number of {np.dtype(dtype).name}: it was "
                              f"cut short, or data.dtype is another.")
    return rest // each


def sidecar_of(path: Path) -> Path:
    return path.with_name(path.name + SIDECAR)


def read_sidecar(path: Path) -> Sidecar | None:
    """None where there is none. Raises UnreadableError where it is not sound."""
    place = sidecar_of(path)
    try:
        stated: Any = json.loads(place.read_text("utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise UnreadableError(f"{place} cannot be read ({error}): make {path.name} again.") from None
    if not isinstance(stated, dict) or (stated.pop("format", None), stated.pop("version", None)) != (_FORMAT, _VERSION):
        raise UnreadableError(f"{place} is no sidecar of {_FORMAT} version {_VERSION}: if it belongs to another "
                              f"program, move it elsewhere.")
    kinds = {"dtype": str, "tokens": int, "documents": int, "vocab_size": int, "end": int, "tokenizer": str,
             "checksum": str}
    if {name: type(value) for name, value in stated.items()} != kinds or stated["dtype"] not in get_args(Width):
        raise UnreadableError(f"{place} is damaged: make {path.name} again.")
    return Sidecar(**stated)


def write_sidecar(path: Path, sidecar: Sidecar) -> None:
    with replacing(sidecar_of(path)) as file:
        file.write(json.dumps({"format": _FORMAT, "version": _VERSION, **asdict(sidecar)}, indent=1).encode() + b"\n")
