"""What the batches held that a rank was given: how much of it was text, and how far its tokens could look."""

from __future__ import annotations

from forge.batch import Batch
from forge.model.flops import mean_keys


class Seen:
    """Sums over the batches it is called with. On the host, before they are copied: the device is asked for nothing.

    window: the model's, in tokens. tokens: B * T of each batch; targets: those of them that are trained on.
    keys: that the tokens may look at, causally, in window and document; pairs: B * T * T, hidden or not.
    documents: whether any batch tells documents apart.
    """

    def __init__(self, window: int | None) -> None:
        self.window = window
        self.tokens, self.targets, self.pairs = 0, 0, 0
        self.keys = 0.0
        self.documents = False

    def __call__(self, batch: Batch) -> Batch:
        rows, length = batch.tensors["tokens"].shape
        self.tokens += rows * length
        self.targets += batch.num_targets
        self.pairs += rows * length**2
        positions = batch.tensors.get("positions")
        if positions is None:
            self.keys += rows * length * mean_keys(length, self.window)
        else:                               # they begin anew with each document
            self.documents = True
            self.keys += float((positions + 1).clamp(max=self.window or length).sum())
        return batch
