"""What a contender computes and keeps, before it is timed: its distance to the plain algorithm, and its memory."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from forge.bench.probes.contenders import Contender

Results = dict[str, Tensor]


def results(contender: Contender) -> Results:
    """The output, and the gradient of x and of every weight, by name; halves of a weight are put together again."""
    x = contender.x.detach().clone().requires_grad_()
    y = contender.forward(x)
    found = torch.autograd.grad(y, [x, *contender.weights.values()], contender.gradient)
    named = dict(zip(["x", *contender.weights], found, strict=True))
    halves = [named.pop(name) for name in ("gate_up.0", "gate_up.1") if name in named]
    return {"y": y.detach(), **named, **({"gate_up": torch.cat(halves, dim=1)} if halves else {})}


def errors(ours: Results, plain: Results) -> dict[str, float]:
    """The distance of each result to the plain one, relative to its size; infinite where it is not finite.

    What is zero by right, as the gradient of a gate whose one weight is always 1, is measured by the largest of all.
    """
    if ours.keys() != plain.keys():
        raise ValueError(f"results for {', '.join(ours)}, and {', '.join(plain)} are wanted")
    sizes = {name: float(wanted.norm()) for name, wanted in plain.items()}
    return {name: distance(ours[name], wanted, sizes[name] or max(sizes.values())) for name, wanted in plain.items()}


def distance(ours: Tensor, wanted: Tensor, size: float) -> float:
    if ours.shape != wanted.shape or size == 0:
        return math.inf
    found = float((ours.float() - wanted).norm()) / size
    return found if math.isfinite(found) else math.inf


def allowed(tolerance: float, dtype: torch.dtype, terms: float) -> float:
    """The error of a contender that is right: `tolerance` roundings of its format, half of eps each, and the random
    walk of float32 sums of so many terms."""
    return tolerance / 2 * (torch.finfo(dtype).eps + math.sqrt(terms) * torch.finfo(torch.float32).eps)


def repeats(ours: Results, again: Results) -> bool:
    return all(torch.equal(value, again[name]) for name, value in ours.items())


def saved_bytes(contender: Contender) -> int:
    """What forward keeps for backward, x included where it is kept, without weights and the output.

    On a GPU by the allocator, so that nothing escapes; elsewhere the distinct storages that autograd saves.
    """
    if contender.x.device.type == "cuda":
        return _by_allocator(contender)
    weights = {weight.untyped_storage().data_ptr() for weight in contender.weights.values()}
    kept: dict[int, Any] = {}       # the storages themselves: the address of one that is gone is given again

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        y = contender.forward(_passing(contender.x))
    return sum(storage.nbytes() for place, storage in kept.items()
               if place not in weights and place != y.untyped_storage().data_ptr())


def _by_allocator(contender: Contender) -> int:
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    y = contender.forward(_passing(contender.x))
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated() - before - y.untyped_storage().nbytes()


def _passing(x: Tensor) -> Tensor:
    """A copy that wants a gradient and is no leaf: it lives on only where it is saved."""
    return x.detach().requires_grad_().clone()


def peak_memory(contender: Contender) -> int | None:
    """Bytes of forward and backward at once, beyond x and the weights; gradients included. None on a CPU."""
    if contender.x.device.type != "cuda":
        return None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    results(contender)
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before
