"""What may be wanted of a sample: text, pictures, labels, arrays. Nothing that could run is ever loaded from data."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

import numpy as np

from forge.data.headers import BadPicture
from forge.data.pictures import Policy, decode

_WHOLE_NUMBER = re.compile(rb"\s*-?[0-9]+\s*")
_MOST_DIGITS = 20


class Seen(NamedTuple):
    """What the index knows of some members, [members] int64 each; see Index."""

    sizes: np.ndarray
    characters: np.ndarray
    widths: np.ndarray
    heights: np.ndarray


Refusals = Iterator[tuple[str, np.ndarray]]     # why members are of no use, and [members] bool, which: the first holds


class BadField(Exception):
    """Why a field's data is of no use. `reason` is short and of few kinds, so that it can be counted."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason} ({detail})" if detail else reason)
        self.reason = reason


class Field(Protocol):
    """names: the fields of a sample that are taken for this, the first that is there ("jpg;jpeg;png"); of a
    conversation's pictures also all that match ("img.*").

    required: a sample without it is dropped.
    """

    @property
    def names(self) -> str: ...
    @property
    def required(self) -> bool: ...

    def refusals(self, seen: Seen) -> Refusals:
        """As far as the index can tell."""
        ...

    def decode(self, data: bytes) -> np.ndarray:
        """Raises BadField."""
        ...


@dataclass(frozen=True)
class Text:
    """UTF-8. keep_empty: text of nothing but white space is a sample; it then has at least its end token.

    invalid_utf8: what becomes of text with other bytes; keep: bytes stay as they are, and a tokenizer that needs
        characters is given the replacement character.
    """

    names: str
    keep_empty: bool
    invalid_utf8: Literal["keep", "drop"]
    setting: str = "data.text_field"        # which names it
    required = True

    def refusals(self, seen: Seen) -> Refusals:
        if self.invalid_utf8 == "drop":
            yield "text that is not UTF-8", seen.characters < 0
        if not self.keep_empty:
            yield "empty text", seen.characters == 0

    def decode(self, data: bytes) -> np.ndarray:
        """[bytes] uint8."""
        return np.frombuffer(data, np.uint8)


@dataclass(frozen=True)
class Picture:
    """See forge.data.pictures.Policy."""

    names: str
    required: bool
    exif: Literal["apply", "ignore"]
    alpha: Literal["white", "black", "drop"]
    max_pixels: int

    def refusals(self, seen: Seen) -> Refusals:
        yield "empty picture", seen.sizes == 0
        yield from self.policy.refusals(seen.widths, seen.heights)

    def decode(self, data: bytes) -> np.ndarray:
        """[height, width, 3] uint8."""
        try:
            return decode(data, self.policy)
        except BadPicture as bad:
            raise BadField(bad.reason, str(bad)) from None

    @property
    def policy(self) -> Policy:
        return Policy(self.exif, self.alpha, self.max_pixels)


@dataclass(frozen=True)
class Label:
    """A whole number in ASCII digits, white space around it or not, of `classes` that begin with 0."""

    names: str
    required: bool
    classes: int

    def refusals(self, seen: Seen) -> Refusals:
        yield "no label", seen.characters == 0

    def decode(self, data: bytes) -> np.ndarray:
        """Scalar, int64. A label outside ends here, and not inside a kernel."""
        if _WHOLE_NUMBER.fullmatch(data) is None:
            raise BadField("no label", repr(data[:_MOST_DIGITS]))
        digits = data.strip()
        if len(digits) > _MOST_DIGITS or not 0 <= int(digits) < self.classes:
            raise BadField("label outside the classes", f"{digits[:_MOST_DIGITS + 1].decode()} of {self.classes}")
        return np.array(int(digits), np.int64)


@dataclass(frozen=True)
class Array:
    """A .npy file of numbers. One that holds Python objects is refused, since loading it would run what it says."""

    names: str
    required: bool

    def refusals(self, seen: Seen) -> Refusals:
        yield "empty array", seen.sizes == 0

    def decode(self, data: bytes) -> np.ndarray:
        """In this machine's byte order, row by row."""
        try:
            read: np.ndarray = np.lib.format.read_array(io.BytesIO(data), allow_pickle=False)
        except Exception as error:
            raise BadField("not an array of numbers", str(error)) from None
        if read.dtype.kind not in "biuf":
            raise BadField("not an array of numbers", f"dtype {read.dtype}")
        return np.ascontiguousarray(read, read.dtype.newbyteorder("="))
