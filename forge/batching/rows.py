"""The tensors of rows that are pieces of documents."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from forge.batch import IGNORED
from forge.batching import Row
from forge.data import Source


def joined(rows: Sequence[Row], source: Source) -> dict[str, Tensor]:
    """"tokens" and "targets", the next token of each: [B, T] int64, for rows of T + 1 tokens."""
    texts = torch.stack([torch.cat([source[piece.sample]["tokens"][piece.start:piece.stop] for piece in row])
                         for row in rows])
    return {"tokens": texts[:, :-1].contiguous(), "targets": texts[:, 1:].contiguous()}


def masked(rows: Sequence[Row], tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Adds "documents" [B, T] int32, numbered within a row, and "positions" [B, T] int64, which begin anew with each.

    The first token of a document is not predicted, since nothing that may be seen foretells it.
    """
    sizes = [torch.tensor([piece.stop - piece.start for piece in row]) for row in rows]
    numbers = torch.stack([torch.arange(len(size)).repeat_interleave(size) for size in sizes])
    places = torch.stack([torch.cat([torch.arange(n) for n in size.tolist()]) for size in sizes])
    foretold = numbers[:, 1:] == numbers[:, :-1]
    return tensors | {"targets": tensors["targets"].masked_fill(~foretold, IGNORED),
                      "documents": numbers[:, :-1].to(torch.int32).contiguous(),
                      "positions": places[:, :-1].contiguous()}
