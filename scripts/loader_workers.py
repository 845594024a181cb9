"""How many pictures a second a loader reads and decodes, with 0, 1, 2, ... worker processes.

    python scripts/loader_workers.py [workers=0,1,2,4] [pictures=600] [side=512] [rounds=3] [out=FILE]

JPEGs of side x side pixels in shards, decoded to [side, side, 3] bytes and handed over in batches. Each round reads an
epoch with each number of workers, in turns; the first update, with which the workers start, is not timed.
"""

from __future__ import annotations

import io
import json
import os
import sys
import tarfile
import tempfile
import time
from pathlib import Path

import numpy as np

from forge.words import reporting, take


def main() -> None:
    asked, rest = take({"workers": "0,1,2,4", "pictures": 600, "side": 512, "rounds": 3, "out": ""}, sys.argv[1:])
    if rest:
        sys.exit(f"not a setting: {' '.join(rest)}")
    counts = [int(number) for number in str(asked["workers"]).split(",")]
    with tempfile.TemporaryDirectory() as name:
        make(Path(name) / "shards", asked["pictures"], asked["side"])
        rates: dict[int, list[float]] = {count: [] for count in counts}
        for number in range(asked["rounds"]):
            for count in counts if number % 2 == 0 else counts[::-1]:
                rates[count].append(rate(Path(name), count))
    result = {"cores": len(os.sched_getaffinity(0)), "load": os.getloadavg()[0],
              "pictures_per_second": {str(count): [round(each) for each in rates[count]] for count in counts}}
    print(json.dumps(result, indent=1))
    if asked["out"]:
        Path(asked["out"]).write_text(json.dumps({"asked": asked, **result}, indent=1))


def make(folder: Path, num_pictures: int, side: int) -> None:
    """Pictures of smooth noise, which compress about as photographs do."""
    from PIL import Image

    folder.mkdir()
    draw = np.random.default_rng(0)
    with tarfile.open(folder / "0.tar", "w") as tar:
        for key in range(num_pictures):
            coarse = Image.fromarray(draw.integers(0, 256, (side // 8, side // 8, 3), np.uint8))
            jpeg = io.BytesIO()
            coarse.resize((side, side), Image.Resampling.BICUBIC).save(jpeg, "JPEG", quality=90)
            for suffix, data in (("jpg", jpeg.getvalue()), ("txt", f"picture {key} of noise".encode())):
                info = tarfile.TarInfo(f"{key:06}.{suffix}")
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))


class Pictures:
    """Samples of a source; the batch of an update carries their pictures."""

    def __init__(self, source) -> None:
        self.source, self.lengths, self.fingerprint = source, source.lengths, source.fingerprint

    def plan(self, source, seed, epoch, global_batch):
        from forge.batching.packed import Packed

        return Packed(32, 1).plan(source, seed, epoch, global_batch)

    def collate(self, rows, source):
        import torch

        samples = [source[piece.sample] for row in rows for piece in row]
        return {"targets": torch.zeros(len(samples), 1, dtype=torch.int64),
                "image": torch.stack([sample["image"] for sample in samples])}


def rate(folder: Path, num_workers: int) -> float:
    from forge.data.fields import Picture
    from forge.data.shards import Shards
    from forge.dataloader.workers import FromWorkers
    from forge.feed import Feed

    picture = Picture("jpg", True, "apply", "white", 10**8)
    data = Shards(train=f"{folder}/shards", heldout=f"{folder}/shards", weights=None, heldout_fraction=0.5,
                  tokenizer="bytes", text_field="txt", pictures={"image": picture}, labels=None, arrays=None,
                  conversation=None,
                  key_dot="first", keep_empty=False, invalid_utf8="keep", shuffle_shards=None, max_bad=0.0, bad_floor=0,
                  staging=None, cache=str(folder / "cache"))
    source = data.open("train")
    feed = Feed(source, Pictures(source), 0, 12, 12, 0, 1)
    reader = FromWorkers(feed, num_workers, 2, True, False)
    works = iter(reader)
    next(works)
    begun, num_read = time.perf_counter(), 0
    for _ in range(len(feed.plan(0)) - 1):
        num_read += sum(len(batch.tensors["image"]) for batch in next(works).batches)
    seconds = time.perf_counter() - begun
    reader.close()
    return num_read / seconds


if __name__ == "__main__":
    with reporting():
        main()
