"""How fast samples come out of tar shards, and pictures out of JPEGs, beside the libraries that others read them with.

One core, from memory: the shard is small enough to stay there.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np

from forge.bench.probes import Row, missing
from forge.bench.probes.beside import beside, rates

if TYPE_CHECKING:
    from forge.bench.driver import Driver
    from forge.data.samples import Samples

SIDES, QUALITY = (500, 375), 90         # of ImageNet's pictures, most of which are this large
MANY = 32                               # different pictures; a shard holds them again and again


def tar(driver: Driver, settings: dict[str, Any]) -> list[Row]:
    """Shards of pictures with captions, and of texts alone: every byte of every field, in the order of the shard, by
    webdataset; by forge, which opens the index and compares every checksum; the same once it is open, in order and in
    random order, as a run reads; and the first look, which makes the index."""
    try:
        kinds = {"pictures": _jpegs(), "texts": None}
    except ImportError as error:
        return [missing("all ways", f"pictures cannot be made ({error}): pip install pillow")]
    table: list[Row] = []
    for kind, pictures in kinds.items():
        with TemporaryDirectory(prefix="forge-bench-") as folder:
            shard = Path(folder) / "000000.tar"
            _write(shard, pictures, settings["shard_mb"] * 1_000_000)
            rows = rates(beside(_ways(shard), settings["seconds"]), "bytes_per_second", "GB/s", 1e9, "webdataset")
        table += [{**row, "name": f"{kind}, {row['name']}"} for row in rows]
    return table


def decoding(driver: Driver, settings: dict[str, Any]) -> list[Row]:
    """Whole JPEGs to RGB: simplejpeg by itself, forge (which looks at the header first), and Pillow."""
    try:
        import simplejpeg
        from PIL import Image

        pictures = _jpegs()
    except ImportError as error:
        return [missing("all ways", f"{error}: pip install pillow simplejpeg")]
    from io import BytesIO

    from forge.data.pictures import Policy, decode

    policy = Policy(exif="apply", alpha="white", max_pixels=1 << 26)

    def every(call: Callable[[bytes], Any]) -> Callable[[], float]:
        def work() -> float:
            for picture in pictures:
                call(picture)
            return len(pictures)
        return work

    ways = {"simplejpeg": every(lambda data: simplejpeg.decode_jpeg(data, colorspace="RGB")),
            "forge": every(lambda data: decode(data, policy)),
            "Pillow": every(lambda data: np.asarray(Image.open(BytesIO(data)).convert("RGB")))}
    return rates(beside(ways, settings["seconds"]), "pictures_per_second", "pictures/s", 1.0, "simplejpeg")


def _ways(shard: Path) -> dict[str, Callable[[], float]]:
    from forge.data.index import keep, make_index

    keep(make_index(shard), shard.parent)
    samples = _samples(shard)
    mixed = np.random.default_rng(0).permutation(len(samples)).tolist()

    def webdataset() -> float:
        from webdataset import WebDataset

        return sum(len(data) for sample in WebDataset(str(shard), shardshuffle=False)
                   for field, data in sample.items() if not field.startswith("__"))

    def read(samples: Samples, order: Iterable[int]) -> float:
        return sum(len(samples.texts[index]) + sum(len(other[index]) for other in samples.others.values())
                   for index in order)

    def forge() -> float:
        opened = _samples(shard)
        return read(opened, range(len(opened)))

    return {"webdataset": webdataset, "forge": forge, "once open": lambda: read(samples, range(len(samples))),
            "once open, mixed": lambda: read(samples, mixed),
            "making the index": lambda: float(make_index(shard).sizes.sum())}


def _samples(shard: Path) -> Samples:
    from forge.data.dropping import Bound, Dropped
    from forge.data.fields import Picture, Text
    from forge.data.index import open_index
    from forge.data.samples import open_samples

    there = any(name.endswith(".jpg") for name in open_index(shard, shard.parent).names)
    picture = Picture("jpg", required=True, exif="apply", alpha="white", max_pixels=1 << 26)
    dropped = Dropped([shard], Bound(0.0, 0))
    return open_samples({"": [shard]}, Text("txt", True, "keep"), {"picture": picture} if there else {}, "first",
                        dropped, shard.parent)


def _write(shard: Path, pictures: list[bytes] | None, num_bytes: int) -> None:
    from webdataset import TarWriter

    draw = random.Random(0)
    written = 0
    with TarWriter(str(shard), encoder=False) as writer:
        while written < num_bytes:
            words = draw.randint(5, 40) * (1 if pictures else 20)           # a caption, or a text of 2 kB
            text = " ".join("abcdefgh"[:draw.randint(1, 8)] for _ in range(words))
            sample: dict[str, Any] = {"__key__": f"{written:012}", "txt": text.encode()}
            if pictures:
                sample["jpg"] = draw.choice(pictures)
            writer.write(sample)
            written += sum(len(data) for data in sample.values() if isinstance(data, bytes))


def _jpegs() -> list[bytes]:
    """Blurred noise on slopes of colour, which takes about as many bytes as a photograph. Raises ImportError."""
    from io import BytesIO

    from PIL import Image

    def drawn() -> Iterator[bytes]:
        draw = np.random.default_rng(0)
        for _ in range(MANY):
            few = Image.fromarray(draw.integers(0, 256, (24, 32, 3), dtype=np.uint8))
            coarse = few.resize(SIDES, Image.Resampling.BICUBIC)
            fine = draw.normal(0, 14, (SIDES[1], SIDES[0], 1))
            pixels = np.clip(np.asarray(coarse, np.float64) + fine, 0, 255).astype(np.uint8)
            packed = BytesIO()
            Image.fromarray(pixels).save(packed, "jpeg", quality=QUALITY)
            yield packed.getvalue()

    return list(drawn())
