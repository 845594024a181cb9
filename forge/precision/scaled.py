"""Linear layers whose three matrix products are computed in 8 bits, with one scale a tensor."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import count
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from forge.errors import ConfigError
from forge.notes import say
from forge.precision.eight_bits import MULTIPLE, ScaledProduct, has_units

_reached: set[str] = set()      # kinds of layers that were called as modules, with the number of their model
_models = count()               # in this process


class ScaledLinear(nn.Linear):
    """nn.Linear, [..., in] -> [..., out] in bfloat16, with products in 8 bits. Weights keep dtype and names.

    kind: the number of the model, and the name without that of its block. by_kernel, fast: see eight_bits.product.
    """

    kind: str
    by_kernel: bool
    fast: bool

    def forward(self, x: Tensor) -> Tensor:
        _reach(self.kind)
        rows = x.flatten(0, -2)
        missing = -rows.shape[0] % MULTIPLE         # rows are what the product for the weight's gradient sums over
        if missing:
            rows = F.pad(rows, (0, 0, 0, missing))
        y: Tensor = ScaledProduct.apply(rows, self.weight, self.by_kernel, self.fast)    # type: ignore[no-untyped-call]
        if missing:
            y = y[:-missing]
        y = y.unflatten(0, x.shape[:-1])
        return y if self.bias is None else y + self.bias.to(y.dtype)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _reach(kind: str) -> bool:
    """Runs at each call, or once where the call is compiled."""
    _reached.add(kind)
    return True


def scale_linears(model: nn.Module, patterns: list[str], fast: bool) -> None:
    """Turn the linear layers inside blocks whose names match into ScaledLinear, in place, and say which.

    Raises ConfigError where none matches.
    """
    by_kernel = has_units(next(model.parameters()).device)
    chosen = [(name, layer) for name, layer in _linears_of_blocks(model)
              if any(fnmatchcase(name, pattern) for pattern in patterns)]
    if not chosen:
        known = sorted({_kind(name) for name, _ in _linears_of_blocks(model)})
        raise ConfigError(f"precision.layers={patterns} matches no linear layer of a block. There are "
                          f"{', '.join(known)}.")
    scaled: set[str] = set()
    model_number = next(_models)
    for name, layer in chosen:
        if layer.in_features % MULTIPLE or layer.out_features % MULTIPLE:
            say(f"precision=fp8: {_kind(name)} stays in bfloat16, because its sizes {layer.in_features} and "
                f"{layer.out_features} are not both multiples of {MULTIPLE}.")
            continue
        layer.__class__ = ScaledLinear
        layer.kind, layer.by_kernel, layer.fast = f"{model_number} {_kind(name)}", by_kernel, fast      # type: ignore[assignment]
        scaled.add(_kind(name))
    if scaled and not by_kernel:
        say("precision=fp8: PyTorch has 8-bit products for NVIDIA GPUs of compute capability 8.9 and later only. Here "
            "the same numbers are computed from rounded factors, which takes longer than precision=bf16.")
    if scaled:
        model.register_forward_hook(Report(model_number, frozenset(scaled)))


def _linears_of_blocks(model: Any) -> Iterator[tuple[str, nn.Linear]]:
    """Exactly nn.Linear: a subclass has a forward of its own."""
    inside = {part for blocks in model.block_lists() for part in blocks.modules()}
    return ((name, part) for name, part in model.named_modules() if part in inside and type(part) is nn.Linear)


def _kind(name: str) -> str:
    return re.sub(r"\.\d+\.", ".*.", name)


@dataclass(frozen=True)
class Report:
    """Says, after the first forward pass, which layers computed in 8 bits. A weight may also be read past its layer,
    as a router does with its gate, and then the layer's format means nothing."""

    model_number: int
    kinds: frozenset[str]

    def __call__(self, model: nn.Module, args: Any, output: Any) -> None:
        reached = sorted(kind for kind in self.kinds if f"{self.model_number} {kind}" in _reached)
        past = sorted(self.kinds - set(reached))
        if reached:
            say(f"precision=fp8: products in 8 bits in {', '.join(reached)}; all others in bfloat16.")
        if past:
            say(f"precision=fp8 has no effect on {', '.join(past)}: the weights are used without calling the layer, "
                f"by another option of the model.")
