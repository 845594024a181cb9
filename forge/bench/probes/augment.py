"""Pictures a second, whole batches of them, in turns that mirror each other."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from math import ceil
from statistics import median, quantiles
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from forge.augment import Augment
from forge.batch import Batch
from forge.bench.probes import Row, missing, sentence
from forge.bench.statistics import Estimate, gain
from forge.bench.turns import Block, Turn, take_blocks, undisturbed
from forge.config import option_of

if TYPE_CHECKING:
    from forge.bench.driver import Driver

NAMES = {"fused": "augment=gpu", "kornia": "augment=gpu augment.path=kornia", "modules": "kornia's modules",
         "cpu": "augment=cpu, one process"}
MOST_CALLS = 200


@dataclass(frozen=True)
class Side:
    """A contender in turns: see forge.bench.turns.Turn, with a batch for a step and a picture for a token."""

    name: str
    call: Callable[[Batch], Any]
    batch: Batch
    calls: int

    def turn(self) -> Turn:
        self.call(self.batch)       # the first finds the caches of another
        self._wait()
        begun = time.perf_counter()
        for _ in range(self.calls):
            self.call(self.batch)
        self._wait()
        seconds = time.perf_counter() - begun
        pictures = self.calls * len(self.batch.tensors["pictures"])
        return Turn(lengths=[seconds / self.calls * 1e3] * self.calls, settling=[], tokens=float(pictures), phases={},
                    wall_seconds=seconds, peak_memory=None, disturbances=[])

    def _wait(self) -> None:
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            torch.cuda.synchronize()


def measure(driver: Driver, settings: dict[str, Any]) -> list[Row]:
    """What is wrong with a contender is its row, and the others are measured."""
    device = driver.run.topology.device
    num, side = settings["num_pictures"], settings["side"]
    generator = torch.Generator().manual_seed(0)
    pictures = torch.randint(0, 256, (num, side, side, 3), generator=generator, dtype=torch.uint8)
    here = Batch({"pictures": pictures, "picture_seeds": torch.arange(num)}, 0, 0)
    rows: dict[str, Row] = {}
    sides = []
    for name in settings["contenders"]:
        try:
            call = _contender(name, settings["recipe"])
            once = Side(name, call, here if name == "cpu" else here.to(device), settings["calls"])
            ms = once.turn().lengths[0]
            calls = min(MOST_CALLS, ceil(settings["seconds"] * 1e3 / ms))
            sides.append(replace(once, calls=max(settings["calls"], calls)))
        except Exception as error:      # a package that is missing, memory that does not suffice
            rows[name] = missing(NAMES[name], sentence(error)) | {"status": "failed"}
    blocks = undisturbed(take_blocks(sides, settings["blocks"], settings["spare"], lambda number, name: None))
    rows |= {side.name: _row(side.name, blocks) for side in sides}
    return [rows[name] for name in settings["contenders"]]


def _contender(name: str, recipe: dict[str, Any]) -> Callable[[Batch], Any]:
    """What is called with a batch on the device, or, for cpu, on the host."""
    if name == "modules":
        return _modules(recipe)
    target = {"cpu": "forge.augment.cpu.InReader"}.get(name, recipe["_target_"])
    path = {"kornia": "kornia", "fused": "fused"}.get(name, recipe["path"])
    option: Augment = option_of("augment", Augment, {**recipe, "_target_": target, "path": path})
    # What the process that reads does: what is left to the device is little beside it.
    return option.read if name == "cpu" else option


def _modules(recipe: dict[str, Any]) -> Callable[[Batch], Tensor]:
    """As kornia's documentation puts them together, with the same strengths. Crops alias where they shrink."""
    from kornia import augmentation

    crop, affine, color, size = recipe["crop"], recipe["affine"], recipe["color"], (recipe["size"], recipe["size"])
    strengths = [color[name] for name in ("brightness", "contrast", "saturation", "hue")]
    chain = augmentation.AugmentationSequential(
        augmentation.RandomResizedCrop(size, tuple(crop["scale"]), tuple(crop["ratio"]), align_corners=False),
        augmentation.RandomHorizontalFlip(p=recipe["flip"]["p"]),
        augmentation.RandomAffine(affine["degrees"], (affine["translate"], affine["translate"]), tuple(affine["scale"]),
                                  affine["shear"], p=affine["p"]),
        augmentation.ColorJitter(*strengths, p=color["p"]),
        augmentation.Normalize(tuple(recipe["mean"]), tuple(recipe["std"])), data_keys=["input"])
    return lambda batch: chain(batch.tensors["pictures"].permute(0, 3, 1, 2).float() / 255)


def _row(name: str, blocks: list[Block]) -> Row:
    if not blocks:
        return missing(NAMES[name], "every block was disturbed") | {"status": "disturbed"}
    rates = [turn.rate for block in blocks
             for other, turn in zip(block.order, block.turns, strict=True) if other == name]
    low, *_, high = quantiles(rates, n=10, method="inclusive")
    row: Row = {"name": NAMES[name], "status": "measured", "pictures_per_second": median(rates), "p10": low,
                "p90": high, "rates": rates,
                "shown": {"pictures/s": f"{median(rates):,.0f}", "10 % to 90 %": f"{low:,.0f} to {high:,.0f}"}}
    for against in ("kornia", "modules"):
        if against in blocks[0].order and against != name:
            found = Estimate.of([block.log_ratio(name, against) for block in blocks])
            ends = [None if end is None else gain(end) + 1 for end in (found.low, found.high)]
            row[f"over_{against}"] = {"estimate": gain(found.mean) + 1, "low": ends[0], "high": ends[1]}
            bounds = "" if ends[0] is None else f" [{ends[0]:.2f}, {ends[1]:.2f}]"
            row["shown"][f"over {against}"] = f"{gain(found.mean) + 1:.2f}{bounds}"
    return row
