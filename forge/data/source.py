"""Sources of tokens from texts."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch

from forge.data import Sample, Source
from forge.data.disk import made_once, writing
from forge.data.texts import Texts
from forge.data.tokenizer import Bytes, FromFile
from forge.errors import UnreadableError
from forge.notes import say

# Rows are windows of documents in random order, so a document is read again for each of its windows.
_KEPT_BYTES = 64 << 20      # of texts that a process keeps; all of data=source_text fits
_AT_A_TIME = 512            # texts tokenised in one call: enough for all cores, little memory


def open_source(texts: Texts, tokenizer: Bytes | FromFile, cache: Path) -> Source:
    """The tokens of `texts`, each followed by the tokenizer's end. Byte tokens need nothing but the index."""
    return ByteSource(texts) if isinstance(tokenizer, Bytes) else TokenSource(texts, tokenizer, cache)


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
    """Ids of a tokenizer.json, made once and kept in the cache folder: ids.bin, uint32, and lengths.npy."""

    def __init__(self, texts: Texts, tokenizer: FromFile, cache: Path) -> None:
        digest = hashlib.blake2b(tokenizer.files[0].read_bytes(), digest_size=16)
        digest.update(f"{tokenizer.end} {texts.fingerprint}".encode())
        self.fingerprint = f"tokens-{digest.hexdigest()}"
        folder = cache / "tokens" / digest.hexdigest()
        with writing(folder, "set data.cache to another folder"):
            made_once(folder, lambda making: _tokenise(texts, tokenizer, making))
        self._ids = folder / "ids.bin"
        self._mapped: np.ndarray | None = None
        self.lengths = self._whole_lengths(folder, len(texts))
        self._ends = np.cumsum(self.lengths)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> Sample:
        if not 0 <= index < len(self):
            raise IndexError(index)
        if self._mapped is None:
            self._mapped = np.memmap(self._ids, "<u4", "r")
        end = int(self._ends[index])
        ids = self._mapped[end - int(self.lengths[index]):end]
        return {"tokens": torch.from_numpy(ids.astype(np.int64))}

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_mapped": None}        # a memmap would be sent as all of its ids

    def _whole_lengths(self, folder: Path, num_texts: int) -> np.ndarray:
        with suppress(OSError, ValueError, EOFError):
            lengths: np.ndarray = np.load(folder / "lengths.npy", allow_pickle=False)
            if len(lengths) == num_texts and self._ids.stat().st_size == 4 * lengths.sum():
                return lengths
        raise UnreadableError(f"{folder} is damaged: delete it, and it is made again.")


def _tokenise(texts: Texts, tokenizer: FromFile, folder: Path) -> None:
    say(f"Tokenising {len(texts)} texts ({texts.sizes.sum() / 1e6:.0f} MB) once with {tokenizer.files[0]}.")
    lengths = []
    with open(folder / "ids.bin", "wb") as file:
        for ids in encoded(texts, tokenizer):
            file.write(np.array(ids, "<u4").tobytes())
            lengths.append(len(ids))
    np.save(folder / "lengths.npy", np.array(lengths, np.int64))


def encoded(texts: Texts, tokenizer: FromFile) -> Iterator[list[int]]:
    """The ids of each text, the tokenizer's end behind them."""
    for first in range(0, len(texts), _AT_A_TIME):
        for ids in tokenizer.encode_all(list(_decoded(texts, first, min(first + _AT_A_TIME, len(texts))))):
            yield [*ids, tokenizer.end]


def _decoded(texts: Texts, first: int, last: int) -> Iterator[str]:
    for index in range(first, last):
        try:
            yield texts[index].decode("utf-8")
        except UnicodeDecodeError:
            raise UnreadableError(f"{texts.place(index)}: the text is not UTF-8, which a tokenizer needs. "
                                  "`python -m forge.shards make` leaves such files out.") from None
