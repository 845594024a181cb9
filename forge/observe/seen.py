"""What the batches held that a rank was given: how much of it was text, and how far its tokens could look."""

from __future__ import annotations

import torch

from forge.batch import Batch
from forge.model.flops import mean_keys


class Seen:
    """Sums over the batches it is called with. On the host, before they are copied: the device is asked for nothing.

    window: the model's, in tokens. tokens: B * T of each batch; targets: those of them that are trained on; padding:
    those that are no text. keys: that the tokens may look at, causally, in window and document, and of them those of
    padding; pairs: B * T * T, hidden or not. pictures: that came with them. documents: whether any batch tells
    documents apart.
    """

    def __init__(self, window: int | None) -> None:
        self.window = window
        self.tokens, self.targets, self.padding, self.pairs = 0, 0, 0, 0
        self.keys, self.padding_keys, self.pictures = 0.0, 0.0, 0
        self.documents = False

    def __call__(self, batch: Batch) -> Batch:
        rows, length = batch.tensors["tokens"].shape
        self.tokens += rows * length
        self.targets += batch.num_targets
        self.pairs += rows * length**2
        self.pictures += len(batch.tensors.get("pictures", ()))
        positions, lengths = batch.tensors.get("positions"), batch.tensors.get("lengths")
        self.documents |= positions is not None
        if positions is None and lengths is None:
            self.keys += rows * length * mean_keys(length, self.window)
            return batch
        places = torch.arange(length)
        keys = ((places if positions is None else positions) + 1).clamp(max=self.window or length).expand(rows, length)
        self.keys += float(keys.sum())
        if lengths is not None:
            padded = places >= lengths.unsqueeze(1)
            self.padding += int(padded.sum())
            self.padding_keys += float(keys[padded].sum())
        return batch

    @property
    def padding_share(self) -> float:
        return self.padding / max(1, self.tokens)

    @property
    def keys_of_text(self) -> float:
        """That a token of text may look at, on average."""
        return (self.keys - self.padding_keys) / max(1, self.tokens - self.padding)

    @property
    def row_length(self) -> float:
        """Places in the row of a token, on average: T where all rows have one length."""
        return self.pairs / max(1, self.tokens)
