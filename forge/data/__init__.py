"""data: what is read. A source is a finite list of samples with known lengths."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, Protocol, runtime_checkable

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

Split = Literal["train", "heldout"]
# "tokens" [length] int64. Of conversations also "trained" [length] bool: which tokens are predicted (absent: all), and
# "pictures" [p, S, S, 3] uint8, in the order of their runs of placeholders among the tokens (absent: none).
Sample = dict[str, "Tensor"]
# These, and what a batch has (see forge.batch.Batch): what else a sample has is called otherwise.
NAMES = frozenset({"tokens", "trained", "pictures", "targets", "documents", "positions", "lengths", "picture_seeds",
                   "picture_samples"})


class Source(Protocol):
    """Random access to the samples of one split. Can be sent to a worker process.

    It may state `order` (see forge.batching.reading), and `coming(seed, epoch, samples)`, which is told which samples
    a process reads next.
    One that reads a part of a sample without the rest offers `piece(index, start, stop)`, tokens [start, stop).
    A source whose samples must not be cut says so in `whole`. One whose samples may have pictures states their side in
    `picture_size` (absent or None: it has none), the id of a placeholder in `picture_token`, and how many of these
    stand for a picture in `tokens_per_picture`. One with questions of several kinds names each sample's in `kinds`.
    """

    lengths: np.ndarray             # [samples] int64: tokens in each sample
    fingerprint: str                # changes when the content or its order changes

    def __len__(self) -> int: ...
    def __getitem__(self, index: int) -> Sample: ...


@runtime_checkable
class Data(Protocol):
    tokenizer: str | None           # "bytes", or the path of a tokenizer.json; None: data are ids, and stay so

    def open(self, split: Split) -> Source:
        """Open a split, making or downloading nothing that is already there. Raises ForgeError."""
        ...
