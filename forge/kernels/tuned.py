from __future__ import annotations
from typing import NamedTuple
class Tiling(NamedTuple):
    rows: int
    columns: int
    depth: int
    warps: int
    stages: int
    per_multiprocessor: int
    by_copier: bool
