"""Documents of token files, by position."""

from __future__ import annotations

import hashlib
import mmap
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from forge.data import Sample
from forge.data.token_format import Layout
from forge.data.token_scan import Scan
from forge.errors import UnreadableError


class TokenFiles:
    """A Source. Files are mapped, so what is read costs memory only as long as the system likes to keep it."""

    def __init__(self, layouts: Sequence[Layout], scans: Sequence[Scan], kept: np.ndarray) -> None:
        """kept: [documents of all files] bool."""
        self._layouts = list(layouts)
        ends = np.concatenate([scan.ends for scan in scans])
        begins = np.concatenate([np.append(0, scan.ends[:-1]) for scan in scans])
        files = np.repeat(np.arange(len(scans)), [len(scan.ends) for scan in scans])
        self._begins, self._files = begins[kept], files[kept]
        self.lengths = (ends - begins)[kept].astype(np.int64)
        told = hashlib.blake2b(" ".join(scan.checksum for scan in scans).encode(), digest_size=16)
        for numbers in (self.lengths, self._begins, self._files):
            told.update(np.ascontiguousarray(numbers, "<i8").tobytes())
        self.fingerprint = f"token-files-{told.hexdigest()}"
        self._mapped: dict[int, tuple[int, mmap.mmap]] = {}

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> Sample:
        if not 0 <= index < len(self):
            raise IndexError(index)
        return {"tokens": self.piece(index, 0, int(self.lengths[index]))}

    def piece(self, index: int, start: int, stop: int) -> Tensor:
        """See forge.data.Source."""
        number = int(self._files[index])
        layout = self._layouts[number]
        if number not in self._mapped:
            self._mapped[number] = _mapped(layout)
        descriptor, mapped = self._mapped[number]
        _require_unchanged(layout, descriptor)      # a file that was cut would end the process, with a bus error
        size = np.dtype(layout.dtype).itemsize
        ids = np.frombuffer(mapped, layout.dtype, stop - start,
                            layout.offset + (int(self._begins[index]) + start) * size).astype(np.int64)
        _require_unchanged(layout, descriptor)
        return torch.from_numpy(ids)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_mapped": {}}


def _mapped(layout: Layout) -> tuple[int, mmap.mmap]:
    """An open descriptor, and the file's bytes. Both live as long as the process."""
    try:
        descriptor = os.open(layout.path, os.O_RDONLY | os.O_CLOEXEC)
        _require_unchanged(layout, descriptor)
        return descriptor, mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise UnreadableError(f"{layout.path} cannot be read any more ({error.strerror}).") from None


def _require_unchanged(layout: Layout, descriptor: int) -> None:
    status = os.fstat(descriptor)
    if (status.st_size, status.st_mtime_ns) != (layout.size, layout.mtime_ns):
        raise UnreadableError(f"{layout.path} has changed since the run began to read it ({layout.size:,} bytes then, "
                              f"{status.st_size:,} now), so what a position in the data means has changed too: put the "
                              f"old file back and resume, or begin anew.")
