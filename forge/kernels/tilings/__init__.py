"""How the grouped products are cut into tiles: tuned per compute capability, in the files beside this one."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch

from forge.kernels import interpreted

PRODUCTS = ("up", "down", "down_backward", "up_backward", "gate_up_gradient", "down_gradient")


class Tiling(NamedTuple):
    """rows, columns: of an output tile. depth: of the sum, a step. warps, stages: Triton's. per_multiprocessor:
    programs that run there at once. by_copier: contiguous blocks are read by the copy engine (TMA, since Hopper)."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int
    per_multiprocessor: int
    by_copier: bool


def tilings(device: torch.device, dtype: torch.dtype) -> dict[str, Tiling]:
    """For each of PRODUCTS. The first four have the same rows, those of forge.kernels.placement."""
    capability = (0, 0) if interpreted() else torch.cuda.get_device_capability(device)
    return _read(capability, dtype.itemsize)


@cache
def _read(capability: tuple[int, int], itemsize: int) -> dict[str, Tiling]:
    folder = Path(__file__).parent
    path = folder / f"sm_{capability[0]}{capability[1]}.json"
    table = json.loads((path if path.exists() else folder / "default.json").read_text())[f"{8 * itemsize} bit"]
    return {product: Tiling(**table[product]) for product in PRODUCTS}
