"""The rate of matrix products: at the shapes of this model, as it multiplies them, and at large squares."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from forge.bench.probes import Row, missing, sentence
from forge.bench.probes.clock import Clock

if TYPE_CHECKING:
    from forge.bench.driver import Driver

PRODUCTS = {"mm", "addmm", "bmm", "baddbmm", "_grouped_mm"}


@dataclass
class Product:
    """One kind of product: what is called, on tensors like which, how often in an update."""

    function: Any
    arguments: tuple[Any, ...]
    options: dict[str, Any]
    count: int = 0

    @property
    def factors(self) -> tuple[Tensor, Tensor]:
        left, right = [item for item in self.arguments if isinstance(item, Tensor) and item.is_floating_point()][-2:]
        return left, right

    @property
    def flops(self) -> float:
        left, right = self.factors      # grouped or not, each number on the left meets one row on the right
        return 2.0 * left.numel() * right.shape[-1]

    @property
    def name(self) -> str:
        left, right = self.factors
        kind = str(self.function).split(".")[1]
        return f"{kind} {_shape(left)} x {_shape(right)} {str(left.dtype).removeprefix('torch.')}"

    def prepared(self, device: torch.device) -> Callable[[], Any]:
        """The same call on random data, in the same layout in memory."""
        arguments = tuple(_like(item, device) for item in self.arguments)
        return lambda: self.function(*arguments, **self.options)


class Recorder(TorchDispatchMode):
    """Notes every product, forward and backward, while it is entered."""

    def __init__(self) -> None:
        super().__init__()      # type: ignore[no-untyped-call]
        self.products: dict[Any, Product] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.name().partition("::")[2].partition(".")[0] in PRODUCTS:
            key = (function, *((item.shape, item.stride(), item.dtype) for item in args if isinstance(item, Tensor)))
            if key not in self.products:
                held = tuple(_kept(item) for item in args)
                options = {name: _kept(item) for name, item in (kwargs or {}).items()}
                self.products[key] = Product(function, held, options)
            self.products[key].count += 1
        return function(*args, **(kwargs or {}))


def measure(driver: Driver, settings: dict[str, Any]) -> list[Row]:
    device = driver.run.topology.device
    clock = Clock(device, settings["seconds"])
    with Recorder() as recorder:
        driver.turn(0, 1)
    products = sorted(recorder.products.values(), key=lambda one: -one.flops * one.count)
    if not products:
        return [missing("shapes of this model", "no product was seen: compiled code hides them (take compile=none).")]
    whole = sum(one.flops * one.count for one in products)
    rows = []
    for one in products[:settings["shapes"]]:
        share = one.flops * one.count / whole
        rows.append(_row(one.name, one.flops, partial(one.prepared, device), clock,
                         {"share_of_products": share, "in_an_update": one.count},
                         {"of the products": f"{share:.1%}"}))
    dtypes = [one.factors[0].dtype for one in products]
    rows += list(squares(max(set(dtypes), key=dtypes.count), settings["square_sizes"], clock))
    best = max((row["flops_per_second"] for row in rows if "flops_per_second" in row), default=None)
    for row in rows:
        if "flops_per_second" in row and best is not None:
            row["of_best"] = row["flops_per_second"] / best
            row["shown"]["of the best"] = f"{row['of_best']:.1%}"
    return rows


def squares(dtype: torch.dtype, sizes: list[int], clock: Clock) -> Iterator[Row]:
    """flops_per_second of products of square matrices, or the reason why there is none, from small to large, until one
    would take too long to be worth it."""
    rate = None
    for size in sorted(sizes):
        name = f"square {size} {str(dtype).removeprefix('torch.')}"
        if rate is not None and 2 * size**3 / rate > 4 * clock.seconds:
            yield missing(name, f"it would take {2 * size**3 / rate:.1f} s a product here (bench.seconds).")
            continue

        def prepared(size: int = size) -> Callable[[], Any]:
            a, b, out = (torch.randn(size, size, device=clock.device).to(dtype) for _ in range(3))
            return lambda: torch.mm(a, b, out=out)

        row = _row(name, 2.0 * size**3, prepared, clock, {}, {})
        rate = row.get("flops_per_second", rate)
        yield row


def _row(name: str, flops: float, prepared: Callable[[], Callable[[], Any]], clock: Clock, more: Row,
         shown: dict[str, str]) -> Row:
    try:
        times = clock.times(prepared())
    except RuntimeError as error:       # out of memory, or a kernel that is missing here
        return missing(name, sentence(error))
    rate = flops / times.median * 1e3
    return {"name": name, "flops": flops, "flops_per_second": rate, **more, **times.record(),
            "shown": {"TFLOP/s": f"{rate / 1e12:.3f}", "ms": f"{times.median:.4f}", **shown}}


def _kept(item: Any) -> Any:
    """Weights and activations by their form alone; where groups begin, with its values."""
    if isinstance(item, Tensor) and item.is_floating_point():
        return torch.empty_strided(item.shape, item.stride(), dtype=item.dtype, device="meta")
    return item.clone() if isinstance(item, Tensor) else item


def _like(item: Any, device: torch.device) -> Any:
    if isinstance(item, Tensor) and item.is_meta:
        return torch.empty_strided(item.shape, item.stride(), dtype=item.dtype, device=device).normal_()
    return item


def _shape(tensor: Tensor) -> str:
    return "x".join(map(str, tensor.shape))
