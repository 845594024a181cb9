"""Sources of tokens from texts."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from forge.data import Sample
from forge.data.conversations import Conversations
from forge.data.disk import made_once, writing
from forge.data.dropping import BadSample, Dropped
from forge.data.fields import BadField, Field
from forge.data.id_file import IdFile
from forge.data.reading import Reading
from forge.data.samples import Samples
from forge.data.staging import Staged
from forge.data.texts import Texts
from forge.data.tokenizer import AT_A_TIME, Bytes, FromFile
from forge.errors import UnreadableError
from forge.notes import say

# Rows are windows of documents in random order, so a document is read again for each of its windows.
_KEPT_BYTES = 64 << 20      # of texts that a process keeps; all of data=source_text fits
_MOST_TRIES = 64            # samples that are tried in the place of a bad one


def open_source(texts: Texts, tokenizer: Bytes | FromFile, cache: Path) -> ByteSource | TokenSource:
    """The tokens of `texts`, each followed by the tokenizer's end. Byte tokens need nothing but the index."""
    return ByteSource(texts) if isinstance(tokenizer, Bytes) else TokenSource(texts, tokenizer, cache)


class SampleSource:
    """Samples of shards: "tokens", and each of `others` that the sample has, as its Field decodes it.

    A sample that cannot be read is dropped and counted. The next of its stream that is at least as long takes its
    place, cut to its length; where none is, the longest, repeated. Conversations are not cut: the longest that is no
    longer takes the place, the next of several, and where there is none, the sample itself, its pictures grey and
    nothing in it trained on. Which one depends on the data alone, so all ranks and workers keep their plan.
    """

    kinds: np.ndarray | None = None

    def __init__(self, samples: Samples, tokens: ByteSource | TokenSource | Conversations, fields: Mapping[str, Field],
                 reading: Reading, dropped: Dropped, staged: Staged | None = None) -> None:
        self._samples, self._tokens, self._fields = samples, tokens, dict(fields)
        self.dropped = dropped
        self.order = reading.order
        self.coming = staged.coming if staged is not None else None
        self.lengths = tokens.lengths
        self.piece = tokens.piece if isinstance(tokens, TokenSource) and not samples.others else None
        conversations = tokens if isinstance(tokens, Conversations) else None
        self.whole = conversations is not None
        self.picture_size = conversations and conversations.picture_size
        self.picture_token = conversations and conversations.picture_token
        self.tokens_per_picture = conversations and conversations.tokens_per_picture
        # How a picture is turned and blended is in no byte of the data, and yet of what is trained on
        others = f"-{samples.fingerprint}-{_digest(repr(sorted(self._fields.items())))}" if samples.others else ""
        self.fingerprint = f"{tokens.fingerprint}{others}{reading.fingerprint}"

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> Sample:
        """Raises UnreadableError where too many samples were bad."""
        if not 0 <= index < len(self):
            raise IndexError(index)
        for other in self._in_turn(index):
            self.dropped.tried()
            try:
                sample = self._read(other)
                return sample if self.whole else self._cut(sample, int(self.lengths[index]))
            except BadSample as bad:
                self.dropped.failed(bad)
                last = bad
        if isinstance(self._tokens, Conversations):
            return self._tokens.blank(index)
        raise UnreadableError(f"{_MOST_TRIES} samples that could take the place of a bad one are bad as well. {last}")

    def column(self, name: str) -> np.ndarray:
        """[samples, ...]: one of the other fields of all samples, which each of them must have. Raises BadField."""
        column = self._samples.others[name]
        return np.stack([self._fields[name].decode(column[index]) for index in range(len(self))])

    def _in_turn(self, index: int) -> Iterator[int]:
        """A sample, and those that may take its place."""
        yield index
        stream = np.flatnonzero(self._samples.streams == self._samples.streams[index])
        after = np.roll(stream, -int(np.searchsorted(stream, index, "right")))[:-1]
        missing = self.lengths[index] - self.lengths[after]
        if self.whole:
            after, missing = after[missing >= 0], missing[missing >= 0]
        missing = np.maximum(missing, 0)
        yield from after[np.argsort(missing, kind="stable")][:_MOST_TRIES].tolist()

    def _read(self, index: int) -> Sample:
        sample = dict(self._tokens[index])
        for name, field in self._fields.items():
            column = self._samples.others[name]
            if column.sizes[index] >= 0:
                try:
                    read = field.decode(column[index])
                    sample[name] = torch.from_numpy(np.require(read, requirements="W"))
                except BadField as bad:
                    raise BadSample(int(column.shards[index]), bad.reason, f"{column.place(index)}: {bad}.") from None
        return sample

    @staticmethod
    def _cut(sample: Sample, length: int) -> Sample:
        tokens = sample["tokens"]
        if len(tokens) != length:
            text = tokens.repeat(-(-length // len(tokens)))[:length - 1]
            sample["tokens"] = torch.cat([text, tokens[-1:]])           # the end token stays
        return sample


def _digest(said: str) -> str:
    return hashlib.blake2b(said.encode(), digest_size=8).hexdigest()


class ByteSource:
    """A token a byte, read from the shards when it is asked for."""

    def __init__(self, texts: Texts) -> None:
        self._texts = texts
        self._kept: OrderedDict[int, bytes] = OrderedDict()
        self._num_kept = 0
        self.lengths = texts.sizes + 1
        self.fingerprint = f"bytes-{texts.fingerprint}"

    def __len__(self) -> int:
        return len(self._texts)

    def __getitem__(self, index: int) -> Sample:
        if not 0 <= index < len(self):
            raise IndexError(index)
        tokens = np.zeros(self.lengths[index], np.int64)        # ends with Bytes.end, which is 0
        tokens[:-1] = np.frombuffer(self._text(index), np.uint8)
        return {"tokens": torch.from_numpy(tokens)}

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_kept": OrderedDict(), "_num_kept": 0}

    def _text(self, index: int) -> bytes:
        """The text, kept until others have pushed it out."""
        if (text := self._kept.pop(index, None)) is None:
            text = self._texts[index]
            self._num_kept += len(text)
        self._kept[index] = text
        while self._num_kept > _KEPT_BYTES and len(self._kept) > 1:
            self._num_kept -= len(self._kept.popitem(last=False)[1])
        return text


class TokenSource:
    """Ids of a tokenizer.json, made once and kept in the cache folder."""

    def __init__(self, texts: Texts, tokenizer: FromFile, cache: Path) -> None:
        digest = hashlib.blake2b(tokenizer.files[0].read_bytes(), digest_size=16)
        digest.update(f"{tokenizer.end} {texts.fingerprint}".encode())
        self.fingerprint = f"tokens-{digest.hexdigest()}"
        folder = cache / "tokens" / digest.hexdigest()
        with writing(folder, "set data.cache to another folder"):
            made_once(folder, lambda making: _tokenise(texts, tokenizer, making))
        self._ids = IdFile(folder, len(texts))
        self.lengths = self._ids.lengths

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> Sample:
        if not 0 <= index < len(self):
            raise IndexError(index)
        return {"tokens": self.piece(index, 0, int(self.lengths[index]))}

    def piece(self, index: int, start: int, stop: int) -> Tensor:
        """See forge.data.Source."""
        return torch.from_numpy(self._ids[index][start:stop].astype(np.int64))


def _tokenise(texts: Texts, tokenizer: FromFile, folder: Path) -> None:
    say(f"Tokenising {len(texts)} texts ({texts.sizes.sum() / 1e6:.0f} MB) once with {tokenizer.files[0]}.")
    IdFile.write(folder, encoded(texts, tokenizer))


def encoded(texts: Texts, tokenizer: FromFile) -> Iterator[list[int]]:
    """The ids of each text, the tokenizer's end behind them."""
    for first in range(0, len(texts), AT_A_TIME):
        for ids in tokenizer.encode_all(list(_decoded(texts, first, min(first + AT_A_TIME, len(texts))))):
            yield [*ids, tokenizer.end]


def _decoded(texts: Texts, first: int, last: int) -> Iterator[str]:
    for index in range(first, last):
        yield texts[index].decode("utf-8", "replace")
