"""What data.staging is worth: epochs read from storage of 20 MB/s, with copies on the local disk and without.

    python scripts/data_cache.py [shards=16] [shard_mb=12] [rate_mb=20] [workers=2] [step_ms=0] [rounds=2] [out=FILE]

The storage is a folder behind an fsspec file system that lets so many bytes a second through, over all processes, in
calls of any size. Each round reads two epochs with each side, in turns (plain, staged, staged, plain ...); the staged
side begins with an empty folder of copies. step_ms: what an update computes, beside reading.
"""

from __future__ import annotations

import io
import json
import mmap
import multiprocessing
import shutil
import struct
import sys
import tarfile
import tempfile
import time
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
from fsspec.implementations.local import LocalFileSystem
from fsspec.spec import AbstractBufferedFile

from forge.words import reporting, take

SAMPLE = 128 << 10      # bytes: of a picture, say
SIDES = ("plain", "staged")


class Toll:
    """Lets `rate` bytes a second through, over all processes that were forked from this one."""

    rate = 0.0

    def __init__(self) -> None:
        self._lock, self._shared = multiprocessing.get_context("fork").Lock(), mmap.mmap(-1, 16)

    def pay(self, num_bytes: int) -> None:
        if self.rate:
            with self._lock:
                free, passed = struct.unpack("dd", self._shared[:])
                free = max(free, time.monotonic()) + num_bytes / self.rate
                self._shared[:] = struct.pack("dd", free, passed + num_bytes)
            time.sleep(max(0.0, free - time.monotonic()))

    @property
    def passed(self) -> float:
        return float(struct.unpack("dd", self._shared[:])[1])


TOLL = Toll()


class SlowFile(AbstractBufferedFile):
    def _fetch_range(self, start: int, end: int) -> bytes:
        TOLL.pay(end - start)
        with open(self.path, "rb") as file:
            file.seek(start)
            return file.read(end - start)


class SlowFileSystem(LocalFileSystem):
    protocol = "slow"

    def _open(self, path: str, mode: str = "rb", block_size: int | None = None, **options: Any) -> SlowFile:
        return SlowFile(self, path, mode, block_size or "default", cache_type=options.get("cache_type", "none"))

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return str(path).removeprefix("slow://")

    def unstrip_protocol(self, name: str) -> str:
        return f"slow://{self._strip_protocol(name)}"


def main() -> None:
    asked, rest = take({"shards": 16, "shard_mb": 12, "rate_mb": 20, "workers": 2, "step_ms": 0, "rounds": 2,
                        "out": ""}, sys.argv[1:])
    if rest:
        sys.exit(f"not a setting: {' '.join(rest)}")
    fsspec.register_implementation("slow", SlowFileSystem)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make(folder / "shards", asked["shards"], (asked["shard_mb"] << 20) // SAMPLE)
        read(folder, "plain", asked, epochs=0)      # the index is made before anything is measured
        TOLL.rate = asked["rate_mb"] * 1e6
        figures: dict[str, list[dict[str, float]]] = {side: [] for side in SIDES}
        for number in range(asked["rounds"]):
            for side in SIDES if number % 2 == 0 else SIDES[::-1]:
                shutil.rmtree(folder / "cache/staged", ignore_errors=True)
                figures[side].append(read(folder, side, asked, epochs=2))
                print(side, json.dumps(figures[side][-1]), flush=True)
    if asked["out"]:
        Path(asked["out"]).write_text(json.dumps({"asked": asked, **figures}, indent=1))


def make(folder: Path, num_shards: int, num_samples: int) -> None:
    """Samples of a short text and an array of bytes that do not compress."""
    folder.mkdir()
    draw = np.random.default_rng(0)
    for shard in range(num_shards):
        with tarfile.open(folder / f"{shard:03}.tar", "w") as tar:
            for key in range(num_samples):
                array = io.BytesIO()
                np.save(array, draw.integers(0, 256, SAMPLE - 128, np.uint8))
                for suffix, data in (("npy", array.getvalue()), ("txt", f"sample {shard} {key}".encode())):
                    info = tarfile.TarInfo(f"{key:06}.{suffix}")
                    info.size = len(data)
                    tar.addfile(info, io.BytesIO(data))


def read(folder: Path, side: str, asked: dict[str, Any], epochs: int) -> dict[str, float]:
    """Seconds of each epoch, in all and waiting for data, and the bytes that passed the toll in it."""
    from forge.batch import Cursor
    from forge.batching.packed import Packed
    from forge.data.fields import Array
    from forge.data.shards import Shards
    from forge.data.staging import Staging
    from forge.dataloader.workers import FromWorkers
    from forge.feed import Feed

    staging = Staging(None, 10.0, 0.0, 2, 2, None) if side == "staged" else None
    data = Shards(train=f"slow://{folder}/shards/*.tar", heldout=f"slow://{folder}/shards/*.tar", weights=None,
                  heldout_fraction=0.5, tokenizer="bytes", text_field="txt", pictures=None, labels=None,
                  arrays={"picture": Array("npy", True)}, conversation=None,
                  key_dot="first", keep_empty=False, invalid_utf8="keep",
                  shuffle_shards=2, max_bad=0.0, bad_floor=0, staging=staging, cache=str(folder / "cache"))
    feed = Feed(data.open("train"), Packed(64, 64), 0, 4, 4, 0, 1)
    reader = FromWorkers(feed, asked["workers"], 2, True, False)
    figures: dict[str, float] = {}
    works = iter(reader) if epochs else iter(())
    cursor = Cursor()
    for epoch in range(1, epochs + 1):
        begun, passed, waited = time.perf_counter(), TOLL.passed, 0.0
        while cursor.epoch < epoch:
            asked_at = time.perf_counter()
            cursor = next(works).cursor
            waited += time.perf_counter() - asked_at
            time.sleep(asked["step_ms"] / 1e3)
        took = time.perf_counter() - begun
        figures |= {f"epoch_{epoch}_s": round(took, 2), f"epoch_{epoch}_wait_s": round(waited, 2),
                    f"epoch_{epoch}_mb_from_storage": round((TOLL.passed - passed) / 1e6, 1)}
    reader.close()
    return figures


if __name__ == "__main__":
    with reporting():
        main()
