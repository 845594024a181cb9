"""How far the gradients of two sides lie from a reference and from each other, tensor by tensor."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from forge.verify.job import found
from forge.verify.rule import EPS, Compared, Distance, Rule


@dataclass(frozen=True)
class Files:
    """Where a job left what it found."""

    folder: Path
    job: str

    @property
    def figures(self) -> dict[str, Any]:
        return found(self.folder, self.job)

    def of_update(self, number: int) -> Path:
        return self.folder / self.job / f"update_{number}.safetensors"


@dataclass
class _Squares:
    """Of all tensors of an update: sums of squares."""

    reference: float = 0.0
    sides: list[float] = field(default_factory=lambda: [0.0, 0.0])
    errors: list[float] = field(default_factory=lambda: [0.0, 0.0])
    apart: float = 0.0
    elements: int = 0
    bits: bool = True


def compared(name: str, reference: Files, baseline: Files, candidate: Files, rule: Rule) -> Compared:
    """One pass of both sides against the reference. Tensors that one side lacks are as far off as can be."""
    figures = [files.figures for files in (reference, baseline, candidate)]
    made = Compared(name, (figures[1]["compute"], figures[2]["compute"]), [], [], [], [], [])
    for index, (truth, before, after) in enumerate(zip(*(one["updates"] for one in figures), strict=True)):
        number = index + 1
        made.losses.append(_scalar("loss", number, truth["loss"], before["loss"], after["loss"], rule))
        files = [one.of_update(number) for one in (reference, baseline, candidate)]
        squares = _tensors(number, files, figures[0].get("order", []), rule, made.tensors)
        if made.compute == ("float32", "float32"):      # shorter formats send a token to another expert now and then
            made.tensors.extend(_terms(number, truth["terms"], before["terms"], after["terms"], rule))
        wanted, own, theirs = (math.sqrt(one) for one in (squares.reference, *squares.sides))
        made.norms.append(_scalar("gradient norm", number, wanted, own, theirs, rule))
        made.overall.append(_overall(number, squares, rule))
        made.values.append({"loss": {"reference": truth["loss"], "baseline": before["loss"],
                                     "candidate": after["loss"]}, "targets": after["targets"], "tied": after["tied"],
                            "moved": [_moved(truth, side) for side in (before, after)],
                            "gradient_norm": {"reference": wanted, "baseline": own, "candidate": theirs}})
    return made


def noise(reference: Files, first: Files, second: Files, updates: int) -> float:
    """How far two runs of the same side lie apart, relative to the reference: the largest of the updates."""
    apart = []
    for number in range(1, updates + 1):
        squares = _Squares()
        with (safe_open(reference.of_update(number), "pt") as truth, safe_open(first.of_update(number), "pt") as one,
              safe_open(second.of_update(number), "pt") as other):
            for name in truth.keys():       # noqa: SIM118
                squares.reference += _square(truth.get_tensor(name))
                squares.apart += _square(one.get_tensor(name).double() - other.get_tensor(name).double())
        apart.append(math.sqrt(squares.apart / squares.reference) if squares.reference else 0.0)
    return max(apart)


def _tensors(number: int, files: list[Path], order: list[str], rule: Rule, into: list[Distance]) -> _Squares:
    """Adds the distance of each gradient, first to last in the model; returns the sums over all.

    order: the names as the model counts them, which a safetensors file does not keep.
    """
    squares = _Squares()
    with safe_open(files[0], "pt") as truth, safe_open(files[1], "pt") as one, safe_open(files[2], "pt") as other:
        names = [set(file.keys()) for file in (truth, one, other)]
        whole = math.sqrt(sum(_square(truth.get_tensor(name)) for name in names[0]))
        for name in sorted(set().union(*names), key=lambda name: (order.index(name) if name in order else len(order))):
            held = [file.get_tensor(name) if name in own else None
                    for file, own in zip((truth, one, other), names, strict=True)]
            into.append(_tensor(name, number, held, whole, rule, squares))
    return squares


def _tensor(name: str, number: int, held: list[Tensor | None], whole: float, rule: Rule,
            squares: _Squares) -> Distance:
    present = next(tensor for tensor in held if tensor is not None)
    truth, before, after = (torch.zeros(present.shape, dtype=torch.float64) if tensor is None else tensor.double()
                            for tensor in held)
    missing = (held[1] is None) != (held[2] is None)
    bits = not missing and (held[1] is held[2] or _same_bits(held[1], held[2]))
    errors = [_square(before - truth), _square(after - truth)]
    apart = _square(after - before)
    squares.reference += _square(truth)
    squares.sides = [squares.sides[0] + _square(before), squares.sides[1] + _square(after)]
    squares.errors = [old + new for old, new in zip(squares.errors, errors, strict=True)]
    squares.apart += apart
    squares.elements += truth.numel()
    squares.bits = squares.bits and bits
    # An expert that no token reached has a gradient of zero: what is wrong there counts against the whole gradient.
    size = max(math.sqrt(_square(truth)), EPS["float32"] * whole) or 1.0
    own, theirs = (math.sqrt(one) / size for one in errors)
    return Distance(name, number, truth.numel(), own, math.inf if missing else theirs, math.sqrt(apart) / size,
                    rule.allowed(own, truth.numel()), bits)


def _overall(number: int, squares: _Squares, rule: Rule) -> Distance:
    size = math.sqrt(squares.reference) or 1.0
    own, theirs = (math.sqrt(one) / size for one in squares.errors)
    return Distance("all gradients", number, squares.elements, own, theirs, math.sqrt(squares.apart) / size,
                    rule.allowed(own, squares.elements), squares.bits)


def _scalar(name: str, number: int, truth: float, before: float, after: float, rule: Rule) -> Distance:
    size = abs(truth) or 1.0
    own, theirs = abs(before - truth) / size, abs(after - truth) / size
    return Distance(name, number, 1, own, theirs, abs(after - before) / size, rule.allowed(own, 1), before == after)


def _terms(number: int, *sides: Any) -> list[Distance]:
    """What the model counts beside the loss (auxiliary losses, the load of experts), where all have it."""
    *terms, rule = sides
    truth, before, after = terms
    made = []
    for name in truth.keys() & before.keys() & after.keys():
        wanted, one, other = (torch.tensor(side[name], dtype=torch.float64).flatten() for side in terms)
        size = math.sqrt(_square(wanted)) or 1.0
        own, theirs, apart = (math.sqrt(_square(gap)) / size for gap in (one - wanted, other - wanted, other - one))
        made.append(Distance(name, number, wanted.numel(), own, theirs, apart, rule.allowed(own, wanted.numel()),
                             torch.equal(one, other)))
    return made


def _moved(truth: dict[str, Any], side: dict[str, Any]) -> float:
    """How many choices of an expert fell otherwise than in the reference, at least."""
    loads = [torch.tensor(one["terms"].get("expert_load", []), dtype=torch.float64) for one in (truth, side)]
    return float((loads[0] - loads[1]).abs().sum()) / 2 if loads[0].shape == loads[1].shape else 0.0


def _square(tensor: Tensor) -> float:
    return float(tensor.double().square().sum())


def _same_bits(one: Tensor | None, other: Tensor | None) -> bool:
    return one is not None and other is not None and one.dtype == other.dtype and torch.equal(one, other)
