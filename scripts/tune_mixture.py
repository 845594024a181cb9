"""Find the tilings of moe_router=fused for the GPU at hand: python scripts/tune_mixture.py OUT [T,d,f,E,k ...]

Every candidate of every product is compiled (in as many processes as there are cores), checked against the candidate
that is in use, and timed in turns; the best by the sum over all shapes, of those that ran at each, is written to
OUT/sm_XY.json, which belongs into forge/kernels/tilings/. A table of all is printed and written beside it.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any

import torch

from forge.kernels import grouped, placement
from forge.kernels.tilings import PRODUCTS, Tiling, tilings

Shape = tuple[int, int, int, int, int]
SHAPES: list[Shape] = [(8192, 2048, 768, 128, 8), (32768, 4096, 1024, 128, 8)]
ROWS = 128                  # of the first four products, whose tiles are laid once
TURNS, LAUNCHES = 5, 4


def candidates(product: str) -> Iterator[Tiling]:
    """What fits into 227 KiB of shared memory, of tiles that have 64 to 256 float32 sums a thread."""
    doubled = 2 if product == "up" else 1       # gate and up
    heights = (128, 256) if product.endswith("gradient") else (ROWS,)
    for rows, columns, depth, warps, stages, many in itertools.product(
            heights, (64, 128, 256), (32, 64), (4, 8), (3, 4, 5, 6), (1, 2)):
        sums = rows * columns * doubled / (32 * warps)
        held = (stages - (2 if product.endswith("gradient") else 0)) * depth * (rows + doubled * columns) * 2
        if 32 <= sums <= 128 and 64 * 1024 <= held * many <= 227 * 1024 and not (depth == 32 and stages < 5):
            yield Tiling(rows, columns, depth, warps, stages, many, True)


class Case:
    """Random tensors of one shape, routed evenly but for chance; on no device where there is only compiling to do."""

    def __init__(self, shape: Shape, device: str) -> None:
        tokens, width, hidden, num_experts, top_k = self.shape = shape
        rows = tokens * top_k

        def normal(*size: int) -> torch.Tensor:
            if device == "cpu":
                return torch.empty(size, dtype=torch.bfloat16)              # untouched pages take no memory
            return torch.randn(size, dtype=torch.bfloat16, device=device) * size[-1] ** -0.5

        self.x, self.grad, self.active, self.h = (
            normal(tokens, width), normal(tokens, width), normal(rows, hidden), normal(rows, 2 * hidden))
        self.gate_up, self.down = normal(num_experts, 2 * hidden, width), normal(num_experts, width, hidden)
        self.weights = torch.rand(tokens, top_k, device=device)
        if device == "cpu":
            sizes = ((tokens, top_k), rows, num_experts, (2, rows // ROWS + num_experts), 1)
            self.where = placement.Placement(*(torch.empty(size, dtype=torch.int32) for size in sizes))
        else:
            experts = torch.rand(tokens, num_experts, device=device).argsort(dim=-1)[:, :top_k].contiguous()
            self.where = placement.place(experts, num_experts, ROWS)

    def run(self, product: str, how: Tiling) -> Any:
        calls: dict[str, Callable[[], Any]] = {
            "up": lambda: grouped.up(self.x, self.gate_up, self.where, how)[1],
            "down": lambda: grouped.down(self.active, self.down, self.where, how, transposed=True),
            "down_backward": lambda: grouped.down_backward(self.grad, self.down, self.weights, self.h, self.where,
                                                           how)[1],
            "up_backward": lambda: grouped.down(self.h, self.gate_up, self.where, how, transposed=False),
            "gate_up_gradient": lambda: grouped.weight_gradient(self.h, self.x, self.where, "right", how),
            "down_gradient": lambda: grouped.weight_gradient(self.grad, self.active, self.where, "left", how)}
        return calls[product]()

    def flops(self, product: str) -> float:
        tokens, width, hidden, _, top_k = self.shape
        return 2 * tokens * top_k * width * hidden * (2 if "up" in product else 1)


def build(job: tuple[Shape, str, Tiling]) -> None:
    """Compile into Triton's cache, without launching."""
    from triton.runtime.jit import JITFunction

    run = JITFunction.run
    multiprocessors = torch.cuda.get_device_properties(0).multi_processor_count
    grouped.num_multiprocessors = lambda device: multiprocessors
    JITFunction.run = lambda self, *args, grid, warmup, **how: run(self, *args, grid=grid, warmup=True, **how)
    try:
        Case(job[0], "cpu").run(*job[1:])
    except Exception as error:
        print(f"{job}: {error!r}"[:300], file=sys.stderr)
    finally:
        JITFunction.run = run


def milliseconds(case: Case, product: str, how: list[Tiling]) -> dict[Tiling, float]:
    """The median over turns in which each candidate is launched a few times; those that fail or are wrong are left
    out."""
    wanted, times = case.run(product, tilings(case.x.device, torch.bfloat16)[product]).float(), {}
    for one in how:
        try:
            error = (case.run(product, one).float() - wanted).norm() / wanted.norm()
            if error < 2**-7:
                times[one] = []
            else:
                print(f"wrong by {error:.3f}: {product} {one} at {case.shape}", file=sys.stderr)
        except Exception as error:
            print(f"{product} {one} at {case.shape}: {error!r}"[:300], file=sys.stderr)
    for _ in range(TURNS):
        for one, spent in times.items():
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            for _ in range(LAUNCHES):
                case.run(product, one)
            stop.record()
            torch.cuda.synchronize()
            spent.append(start.elapsed_time(stop) / LAUNCHES)
    return {one: median(spent) for one, spent in times.items()}


def main() -> None:
    out = Path(sys.argv[1])
    shapes = [tuple(map(int, word.split(","))) for word in sys.argv[2:]] or SHAPES
    out.mkdir(parents=True, exist_ok=True)
    jobs = [(shape, product, how) for shape in shapes for product in PRODUCTS for how in candidates(product)]
    print(f"compiling {len(jobs)} kernels", flush=True)
    with ProcessPoolExecutor(max(1, (os.cpu_count() or 2) - 1), get_context("spawn")) as pool:
        try:
            list(pool.map(build, jobs, chunksize=4))
        except BrokenProcessPool as error:          # a compiler crashed: what is missing is compiled when it is run
            print(f"compiling ahead ended early: {error}", file=sys.stderr)
    lines, sums = [], {product: dict[Tiling, float]() for product in PRODUCTS}
    for shape in shapes:
        case = Case(shape, "cuda")
        for product in PRODUCTS:
            found = milliseconds(case, product, list(candidates(product)))
            for rank, (how, spent) in enumerate(sorted(found.items(), key=lambda item: item[1])):
                lines.append(f"{shape} {product:17} {spent:8.3f} ms {case.flops(product) / spent / 1e9:6.0f} TFLOP/s "
                             f"{tuple(how)}")
                print(lines[-1] if rank < 3 else "", end="\n" if rank < 3 else "", flush=True)
            if not found:
                continue
            kept = found if not sums[product] else {how: sums[product][how] for how in found if how in sums[product]}
            # Each shape counts alike: by the time relative to its best.
            sums[product] = {how: (sums[product].get(how, 0.0)) + found[how] / min(found.values()) for how in kept}
        del case
    used = tilings(torch.device("cuda"), torch.bfloat16)
    best = {product: min(found, key=lambda how: found[how], default=used[product]) for product, found in sums.items()}
    write(out, best, lines)


def write(out: Path, best: dict[str, Tiling], lines: list[str]) -> None:
    major, minor = torch.cuda.get_device_capability()
    wide = tilings(torch.device("cuda"), torch.float32)
    tables = {"16 bit": best, "32 bit": wide}
    text = ",\n".join(f'  "{name}": {{\n' + ",\n".join(
        f'    "{product}": {json.dumps(table[product]._asdict())}' for product in PRODUCTS) + "\n  }"
        for name, table in tables.items())
    (out / f"sm_{major}{minor}.json").write_text(f"{{\n{text}\n}}\n")
    (out / "tune_mixture.txt").write_text("\n".join(lines) + "\n")
    print(f"written: {out}/sm_{major}{minor}.json, {out}/tune_mixture.txt")


if __name__ == "__main__":
    main()
