"""Ids of samples, made once and kept in the cache folder."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from forge.errors import UnreadableError


class IdFile:
    """ids.bin, uint32, one sample after the other, and lengths.npy. Can be sent to a worker process."""

    def __init__(self, folder: Path, num_samples: int) -> None:
        """Raises UnreadableError where the folder does not hold so many samples."""
        self._ids = folder / "ids.bin"
        self._mapped: np.ndarray | None = None
        self.lengths = self._whole_lengths(folder, num_samples)
        self._ends = np.cumsum(self.lengths)

    @staticmethod
    def write(folder: Path, samples: Iterable[list[int] | np.ndarray]) -> None:
        lengths = []
        with open(folder / "ids.bin", "wb") as file:
            for ids in samples:
                file.write(np.asarray(ids, "<u4").tobytes())
                lengths.append(len(ids))
        np.save(folder / "lengths.npy", np.array(lengths, np.int64))

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> np.ndarray:
        """[length] uint32."""
        if self._mapped is None:
            self._mapped = np.memmap(self._ids, "<u4", "r")
        end = int(self._ends[index])
        return self._mapped[end - int(self.lengths[index]):end]

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_mapped": None}        # a memmap would be sent as all of its ids

    def _whole_lengths(self, folder: Path, num_samples: int) -> np.ndarray:
        with suppress(OSError, ValueError, EOFError):
            lengths: np.ndarray = np.load(folder / "lengths.npy", allow_pickle=False)
            if len(lengths) == num_samples and self._ids.stat().st_size == 4 * lengths.sum():
                return lengths
        raise UnreadableError(f"{folder} is damaged: delete it, and it is made again.")
