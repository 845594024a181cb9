"""Sets of pictures that forge makes itself, once, as shards in the cache folder: what their options share."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from forge.data import Source, Split
from forge.data.conversation import Conversation
from forge.data.disk import cache_folder, made_once, writing
from forge.data.fields import Label, Picture
from forge.data.pack import Packed, pack_samples
from forge.data.shards import Shards
from forge.data.tokenizer import vocabulary_problems
from forge.data.turns import MARK
from forge.errors import UnreadableError, UnusableEnvironment
from forge.notes import say

if TYPE_CHECKING:
    from forge.config import Config

FORMATS = ("png", "jpg")        # pictures are of both, in turn, so that both ways of reading are used
_FORMAT = 1                     # of the made folder; another number makes the sets anew
_SPLITS: tuple[Split, ...] = ("train", "heldout")
_NOT_OF_THE_SET = ("tokenizer", "conversation", "cache")


@dataclass(frozen=True)
class Embedded:
    """A set of square pictures, read as data=shards reads any.

    size: pixels of a side. heldout: the fraction held out. shard_mb: MiB of data in a shard. tokenizer, conversation,
    cache: as for data=shards; the shards are in the cache as well. A sample has a picture, a caption (txt) and a
    conversation (json).
    """

    size: int
    heldout: float
    shard_mb: int
    tokenizer: str
    conversation: Conversation
    cache: str | None

    name: ClassVar[str]
    kinds: ClassVar[tuple[str, ...]] = ()       # of questions; a sample's own is then its label, in the field cls

    def made(self, split: Split) -> Iterable[Packed]:
        """The samples of a split, a pure function of the settings. Needs optional packages."""
        raise NotImplementedError

    def open(self, split: Split) -> Source:
        folder = self._folder()
        if not any((folder / split).glob("*.tar")):
            raise UnusableEnvironment(f"{folder} holds no {split} shards: delete it, and it is made again.")
        try:
            source = self._shards(folder).open(split)
        except UnreadableError as error:
            raise UnreadableError(f"{error} If {folder} is damaged, delete it, and it is made again.") from None
        if self.kinds and self.conversation.messages_field is not None:
            source.kinds = np.array(self.kinds)[source.column("kind")]
        return source

    def problems(self, config: Config) -> Iterator[str]:
        if not 0 < self.heldout < 1:
            yield f"data.heldout={self.heldout} is no fraction between 0 and 1: set it to 0.1, for example"
        for setting, least in (("size", 8), ("shard_mb", 1)):
            if getattr(self, setting) < least:
                yield f"data.{setting}={getattr(self, setting)}: at least {least} is wanted"
        yield from vocabulary_problems(self.tokenizer, config)
        yield from self.conversation.problems(self.tokenizer, True, config)

    def _folder(self) -> Path:
        settings = {name: value for name, value in vars(self).items() if name not in _NOT_OF_THE_SET}
        key = hashlib.blake2b(json.dumps([_FORMAT, settings], sort_keys=True).encode(), digest_size=8).hexdigest()
        folder = cache_folder(self.cache) / self.name / key
        with writing(folder, "set data.cache to another folder"):
            return made_once(folder, lambda making: self._make(making, folder))

    def _make(self, making: Path, folder: Path) -> None:
        say(f"Making the pictures of data={self.name} once, in {folder}.")
        started = time.perf_counter()
        for split in _SPLITS:
            if not pack_samples(self.made(split), making / split, self.shard_mb << 20):
                raise UnusableEnvironment(f"No picture falls to the {split} split: set data.heldout={self.heldout} "
                                          "nearer to a half, or make more pictures.")
        say(f"Made in {time.perf_counter() - started:.1f} s.")

    def _shards(self, folder: Path) -> Shards:
        """The made folder as it would be named on the command line. Nothing in it is bad, so nothing bad is allowed."""
        pictures = Picture(";".join(FORMATS), required=True, exif="ignore", alpha="drop", max_pixels=self.size**2)
        labels = {"kind": Label("cls", required=True, classes=len(self.kinds))} if self.kinds else None
        return Shards(train=str(folder / "train"), heldout=str(folder / "heldout"), weights=None, heldout_fraction=0.0,
                      tokenizer=self.tokenizer, text_field="txt", pictures={"picture": pictures}, labels=labels,
                      arrays=None, conversation=self.conversation, key_dot="first", keep_empty=False,
                      invalid_utf8="drop", shuffle_shards=None, max_bad=0.0, bad_floor=0, staging=None,
                      cache=self.cache)


def about_a_picture(turns: Sequence[tuple[str, str]]) -> bytes:
    """The json field of a conversation of (question, answer) turns; the picture stands before the first."""
    said = [(f"{'' if number else MARK}{question}", answer) for number, (question, answer) in enumerate(turns)]
    messages = [{"role": role, "content": content} for turn in said
                for role, content in zip(("user", "assistant"), turn, strict=True)]
    return json.dumps({"messages": messages}).encode()
