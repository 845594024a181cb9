"""The tensors of rows that are pieces of documents."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from forge.batch import IGNORED
from forge.batching import Piece, Row
from forge.data import Sample, Source
from forge.errors import UnreadableError


def joined(rows: Sequence[Row], source: Source) -> dict[str, Tensor]:
    """"tokens" and "targets", the next token of each: [B, T] int64, for rows of T + 1 tokens."""
    texts = torch.stack([torch.cat([sample["tokens"] for sample in row]) for row in _read(rows, source)])
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
    samples = _read(rows, source)
    tensors = _padding(len(rows), length) | {"documents": torch.zeros(len(rows), length, dtype=torch.int32),
                                             "positions": torch.zeros(len(rows), length, dtype=torch.int64)}
    for row, pieces in enumerate(rows):
        begin = 0
        for number, piece in enumerate(pieces):
            end = _lay(tensors, row, begin, piece, samples[row][number])
            tensors["documents"][row, begin:end] = number
            tensors["positions"][row, begin:end] = torch.arange(end - begin)
            begin = end
        tensors["documents"][row, begin:] = len(pieces)
        tensors["positions"][row, begin:] = torch.arange(length - begin)
        tensors["lengths"][row] = begin
    return _with_pictures(tensors, rows, samples, source)


def one_below_another(rows: Sequence[Row], each: int, length: int, source: Source) -> dict[str, Tensor]:
    """A piece in a row of T = length, and `each` of these for a row of the plan.

    Padding comes last, so causal attention hides it without a mask.
    """
    samples = _read(rows, source)
    tensors = _padding(len(rows) * each, length)
    for row, pieces in enumerate(rows):
        for place, piece in enumerate(pieces):
            tensors["lengths"][row * each + place] = _lay(tensors, row * each + place, 0, piece, samples[row][place])
    return _with_pictures(tensors, rows, samples, source)


def _read(rows: Sequence[Row], source: Source) -> list[list[Sample]]:
    """Each piece's sample, its tokens cut to the piece."""
    read = getattr(source, "piece", None)
    return [[_cut(source, piece) if read is None else {"tokens": read(*piece)} for piece in row] for row in rows]


def _cut(source: Source, piece: Piece) -> Sample:
    sample = source[piece.sample]
    return sample | {name: sample[name][piece.start:piece.stop] for name in ("tokens", "trained") if name in sample}


def _padding(num_rows: int, length: int) -> dict[str, Tensor]:
    return {"tokens": torch.zeros(num_rows, length, dtype=torch.int64),
            "targets": torch.full((num_rows, length), IGNORED), "lengths": torch.zeros(num_rows, dtype=torch.int64)}


def _lay(tensors: dict[str, Tensor], row: int, begin: int, piece: Piece, sample: Sample) -> int:
    """Puts a piece of n + 1 tokens into n places from `begin` on; the place behind it.

    What the sample does not train on is not predicted. A sample in the place of a bad one may be shorter: the rest of
    the place stays empty, so that what follows lies where the plan has it.
    """
    text = sample["tokens"]
    end = begin + len(text) - 1
    targets = text[1:]
    if (trained := sample.get("trained")) is not None:
        targets = targets.masked_fill(~trained[1:], IGNORED)
    tensors["tokens"][row, begin:end], tensors["targets"][row, begin:end] = text[:-1], targets
    return begin + piece.stop - piece.start - 1


def _with_pictures(tensors: dict[str, Tensor], rows: Sequence[Row], samples: list[list[Sample]],
                   source: Source) -> dict[str, Tensor]:
    """Adds the pictures of a source that may have any, in the order of their placeholders. These are not predicted."""
    size, token = getattr(source, "picture_size", None), getattr(source, "picture_token", None)
    if size is None or token is None:
        return tensors
    pictures, numbers = [torch.zeros(0, size, size, 3, dtype=torch.uint8)], []
    for row, of_row in zip(rows, samples, strict=True):
        for piece, sample in zip(row, of_row, strict=True):
            if (shown := sample.get("pictures")) is not None:
                pictures.append(shown)
                numbers += [(piece.sample, number) for number in range(len(shown))]
    num_placeholders, each = int((tensors["tokens"] == token).sum()), int(getattr(source, "tokens_per_picture", 0))
    if num_placeholders != len(numbers) * each:
        raise UnreadableError(f"A batch has {num_placeholders} placeholders (id {token}) and {len(numbers)} pictures, "
                              f"which want {each} each: a sample was cut inside a picture, or its text has that id.")
    return tensors | {"targets": tensors["targets"].masked_fill(tensors["targets"] == token, IGNORED),
                      "pictures": torch.cat(pictures),
                      "picture_samples": torch.tensor(numbers, dtype=torch.int64).reshape(-1, 2)}
