"""A shard copied from slow storage to a local disk: whole and verified, or not at all."""

from __future__ import annotations

import os
from pathlib import Path

from forge.data.index import checksum, kept_index
from forge.data.storage import Location, open_file, status
from forge.data.tar import Fault, Member, walk

_AT_A_TIME = 4 << 20        # bytes: long reads for storage, and a stop is noticed soon


class BadCopy(Exception):
    """Why a copy is not used: a few words for a sentence."""


def copy_shard(location: Location, size: int, version: int, part: Path, indices: Path) -> None:
    """Copy a shard into the file `part`, which is then on the disk, and is what was indexed.

    size, version: of when it was indexed. indices: the cache folder of indices. Raises OSError, and BadCopy.
    """
    source = open_file(location)
    if (source.size, source.version) != (size, version):
        raise BadCopy("the shard changed since it was indexed")
    with open(part, "xb", buffering=0) as file:
        at = 0
        while chunk := source.read(_AT_A_TIME, at):
            file.write(chunk)
            at += len(chunk)
        os.fsync(file.fileno())
    if at != size:
        raise BadCopy(f"the transfer ended after {at:,} of {size:,} bytes")
    if status(location) != (size, version):
        raise BadCopy("the shard changed while it was copied")
    _verify(part, location, size, version, indices)


def _verify(part: Path, location: Location, size: int, version: int, indices: Path) -> None:
    """By the checksums of the index; where none is kept, by a strict walk."""
    file = open_file(part)
    index = kept_index(location, indices)
    if index is not None and (index.size, index.version) == (size, version):
        for name, offset, length, value in zip(index.names, index.offsets.tolist(), index.sizes.tolist(),
                                               index.checksums.tolist(), strict=True):
            if checksum(file, Member(name, offset, length)) != value:
                raise BadCopy(f"the bytes from {offset:,} on are not those that were indexed")
        return
    for found in walk(file):
        if isinstance(found, Fault) and not found.harmless:
            raise BadCopy(f"byte {found.offset:,}: {found.reason}")
