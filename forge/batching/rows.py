"""The tensors of rows that are pieces of documents."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from forge.batch import IGNORED
from forge.batching import Piece, Row
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


def side_by_side(rows: Sequence[Row], length: int, source: Source) -> dict[str, Tensor]:
    """Pieces one after the other in rows of T = length, the rest padding, which is a document of its own."""
    tensors = _padding(len(rows), length) | {"documents": torch.zeros(len(rows), length, dtype=torch.int32),
                                             "positions": torch.zeros(len(rows), length, dtype=torch.int64)}
    for row, pieces in enumerate(rows):
        begin = 0
        for number, piece in enumerate(pieces):
            end = _lay(tensors, row, begin, piece, source)
            tensors["documents"][row, begin:end] = number
            tensors["positions"][row, begin:end] = torch.arange(end - begin)
            begin = end
        tensors["documents"][row, begin:] = len(pieces)
        tensors["positions"][row, begin:] = torch.arange(length - begin)
        tensors["lengths"][row] = begin
    return tensors


def one_below_another(rows: Sequence[Row], each: int, length: int, source: Source) -> dict[str, Tensor]:
    """A piece in a row of T = length, and `each` of these for a row of the plan.

    Padding comes last, so causal attention hides it without a mask.
    """
    tensors = _padding(len(rows) * each, length)
    for row, pieces in enumerate(rows):
        for place, piece in enumerate(pieces):
            tensors["lengths"][row * each + place] = _lay(tensors, row * each + place, 0, piece, source)
    return tensors


def _padding(num_rows: int, length: int) -> dict[str, Tensor]:
    return {"tokens": torch.zeros(num_rows, length, dtype=torch.int64),
            "targets": torch.full((num_rows, length), IGNORED), "lengths": torch.zeros(num_rows, dtype=torch.int64)}


def _lay(tensors: dict[str, Tensor], row: int, begin: int, piece: Piece, source: Source) -> int:
    """Puts a piece of n + 1 tokens into n places from `begin` on; the place behind it."""
    text = source[piece.sample]["tokens"][piece.start:piece.stop]
    end = begin + len(text) - 1
    tensors["tokens"][row, begin:end], tensors["targets"][row, begin:end] = text[:-1], text[1:]
    return end
