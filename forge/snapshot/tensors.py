"""Safetensors files, written and read one tensor at a time: what is spread over ranks is never together in memory."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor

from forge.parallel.spread import Spread

# The format's own names (github.com/huggingface/safetensors).
_NAMES = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
          torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.int64: "I64", torch.int32: "I32",
          torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL"}


class Entry(NamedTuple):
    """A tensor to be written. spread: None where every rank holds all of it."""

    name: str
    tensor: Tensor
    spread: Spread | None

    @property
    def shape(self) -> torch.Size:
        return self.tensor.shape if self.spread is None else self.spread.whole

    @property
    def nbytes(self) -> int:
        return self.shape.numel() * self.tensor.element_size()

    def whole(self) -> Tensor:
        """On the host. All ranks of its axis call it, and the first gets it."""
        tensor = self.tensor.detach()
        return tensor.cpu().contiguous() if self.spread is None else self.spread.gather(tensor)


def entries(values: Mapping[str, Any], spread: Mapping[str, Spread]) -> list[Entry]:
    """The tensors of a state, wide types first, so that each lies at a multiple of its width; the same order on every
    rank. What has a parameter's shape and begins with its name is spread as it is."""
    found = [Entry(name, value, _spread_at(name, value.shape, spread, whole=False))
             for name, value in values.items() if isinstance(value, Tensor)]
    return sorted(found, key=lambda entry: (-entry.tensor.element_size(), entry.name))


def write_tensors(file: Path, listed: list[Entry], wholes: Iterable[Tensor], metadata: dict[str, str]) -> None:
    """wholes: the tensors that `listed` announces, each on the host, in this order."""
    header: dict[str, Any] = {"__metadata__": metadata}
    end = 0
    for entry in listed:
        header[entry.name] = {"dtype": _NAMES[entry.tensor.dtype], "shape": list(entry.shape),
                              "data_offsets": [end, end := end + entry.nbytes]}
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)
    with file.open("wb") as opened:
        opened.write(len(head).to_bytes(8, "little") + head)
        for tensor in wholes:
            opened.write(tensor.reshape(-1).view(torch.uint8).numpy().data)
            del tensor                          # before the next is gathered


def read_tensors(file: Path, spread: Mapping[str, Spread]) -> tuple[dict[str, str], dict[str, Tensor]]:
    """(metadata, the tensors on the host), where only this rank's slice is read of what is spread."""
    with safe_open(file, "pt") as opened:
        tensors = {}
        for name in opened.keys():  # noqa: SIM118
            cut = _spread_at(name, torch.Size(opened.get_slice(name).get_shape()), spread, whole=True)
            tensors[name] = opened.get_tensor(name) if cut is None else opened.get_slice(name)[cut.mine]
        return opened.metadata() or {}, tensors


def _spread_at(name: str, shape: torch.Size, spread: Mapping[str, Spread], whole: bool) -> Spread | None:
    """name: of a parameter, or "<parameter>/<state>"."""
    found = spread.get(name.partition("/")[0])
    return found if found is not None and shape == (found.whole if whole else found.shape) else None
