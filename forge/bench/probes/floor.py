"""How fast a layer of mixed experts could be at best, at the rates of this machine, measured beside its contenders.

Each launch takes as long as its products at the rate of a large one, or its bytes at the rate of a large copy,
whichever is longer, and the launches follow each other. Tokens are gathered inside the products, the activation is in
their epilogues, every tensor is moved once, and rows are stored before they are combined, so that bits repeat.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from forge.bench.probes.clock import Clock
from forge.bench.probes.contenders import Layer
from forge.bench.probes.copy import copied
from forge.bench.probes.matmul import squares

LOGIT = 4       # bytes: float32
SMALL = 1024    # rows of a product that any machine multiplies


class Launch(NamedTuple):
    name: str
    flops: float
    num_bytes: float


@dataclass(frozen=True)
class Rates:
    """flops_per_second: of a square product of so many rows in the number format of the layer. bytes_per_second: of a
    copy of so many MB, read and written."""

    flops_per_second: float
    bytes_per_second: float
    square_size: int
    copy_mb: int

    @classmethod
    def measured(cls, device: torch.device, dtype: torch.dtype, settings: dict[str, Any]) -> Rates | str:
        """Or why there are none. A machine that is slow at large products is measured at a smaller one."""
        clock, sizes = Clock(device, settings["seconds"]), sorted({settings["square_size"], SMALL})
        sizes = [size for size in sizes if size <= settings["square_size"]]
        products = list(zip(sizes, squares(dtype, sizes, clock), strict=True))
        moved = copied(settings["copy_mb"], clock)
        found = [(size, row["flops_per_second"]) for size, row in products if "flops_per_second" in row]
        if not found or "bytes_per_second" not in moved:
            row = moved if found else products[0][1]
            return f"{row['name']}: {row['reason']}"
        size, rate = found[-1]
        return cls(rate, moved["bytes_per_second"], size, settings["copy_mb"])

    def ms(self, launches: list[Launch]) -> float:
        return 1e3 * sum(max(one.flops / self.flops_per_second, one.num_bytes / self.bytes_per_second)
                         for one in launches)


def forward(layer: Layer) -> list[Launch]:
    sizes = Sizes.of(layer)
    return [Launch("gate", sizes.gate, sizes.tokens + 2 * sizes.logits),        # written, and read by the choice
            Launch("up", 2 * sizes.product, sizes.tokens + 2 * sizes.weight + 3 * sizes.hidden_rows),
            Launch("down", sizes.product, sizes.hidden_rows + sizes.weight + sizes.rows),
            Launch("combine", 0, sizes.rows + sizes.tokens)]


def backward(layer: Layer) -> list[Launch]:
    """What enters the activation is read, its gradient is written, and the activation, computed again, too."""
    sizes = Sizes.of(layer)
    return [Launch("down_backward", sizes.product, sizes.tokens + sizes.weight + 5 * sizes.hidden_rows),
            Launch("down_gradient", sizes.product, sizes.tokens + sizes.hidden_rows + sizes.weight),
            Launch("up_backward", 2 * sizes.product, 2 * sizes.hidden_rows + 2 * sizes.weight + sizes.rows),
            Launch("combine", 0, sizes.rows + sizes.tokens),
            Launch("gate_up_gradient", 2 * sizes.product, sizes.tokens + 2 * sizes.hidden_rows + 2 * sizes.weight),
            Launch("gate", 2 * sizes.gate, 2 * sizes.tokens + 2 * sizes.logits)]


class Sizes(NamedTuple):
    """Bytes of [tokens, width], of [rows, width] and [rows, hidden], of one of three weights of all experts, and of
    the logits; operations of one product of all rows with such a weight, and of the gate's product."""

    tokens: float
    rows: float
    hidden_rows: float
    weight: float
    logits: float
    product: float
    gate: float

    @classmethod
    def of(cls, layer: Layer) -> Sizes:
        (num_tokens, width), (num_experts, _, hidden), size = layer.x.shape, layer.down.shape, layer.x.element_size()
        return cls(num_tokens * width * size, layer.rows * width * size, layer.rows * hidden * size,
                   layer.down.numel() * size, num_tokens * num_experts * LOGIT,
                   2.0 * layer.rows * width * hidden, 2.0 * num_tokens * width * num_experts)
