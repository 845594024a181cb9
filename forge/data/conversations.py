"""The source of conversations and captions: ids made once, pictures read when they are asked for."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from forge.data import Sample
from forge.data.conversation import Conversation
from forge.data.disk import made_once, writing
from forge.data.dropping import BadSample, Dropped
from forge.data.fields import Picture
from forge.data.headers import BadPicture
from forge.data.id_file import IdFile
from forge.data.samples import Samples
from forge.data.texts import Texts
from forge.data.tokenizer import AT_A_TIME, Bytes, FromFile
from forge.data.turns import Part, Refused, Template
from forge.errors import ConfigError, UnreadableError
from forge.notes import say

_TRAINED = 1 << 31      # this bit of an id in the file: it is trained on
_REASONS = "reasons.json"


@dataclass(frozen=True, eq=False)
class Layout:
    """The ids of all samples of some shards; those of a sample that is of no use are none."""

    ids: IdFile
    template: Template
    fingerprint: str


def open_layout(samples: Samples, conversation: Conversation, tokenizer: Bytes | FromFile,
                pictures: Iterable[str], dropped: Dropped, cache: Path) -> Layout:
    """Made once and kept in the cache folder. Samples of no use are counted in `dropped`. pictures: names of fields.

    Raises ConfigError where none is of use, and UnreadableError where too many are not.
    """
    template = conversation.template(tokenizer)
    digest = hashlib.blake2b(digest_size=16)
    digest.update(b"bytes" if isinstance(tokenizer, Bytes) else tokenizer.files[0].read_bytes())
    digest.update(f"1 {template} {conversation.messages_field is None} {conversation.max_length} "
                  f"{conversation.picture_size} {conversation.max_tiles} {samples.texts.fingerprint}".encode())
    columns = [column for name in pictures for column in samples.columns(name)]
    for column in columns:
        digest.update(np.where(column.sizes[:, None] >= 0, column.sides, -1).astype("<i4").tobytes())
    folder = cache / "conversations" / digest.hexdigest()
    with writing(folder, "set data.cache to another folder"):
        made_once(folder, lambda making: _Making(samples, conversation, template, tokenizer, columns).write(making))
    layout = Layout(IdFile(folder, len(samples)), template, f"conversations-{digest.hexdigest()}")
    _count(folder, samples.texts, dropped)
    if not (num_kept := int((layout.ids.lengths > 0).sum())):
        raise ConfigError(f"No sample can be trained on. Dropped were {dropped.sentence()}.")
    if num_kept < len(samples):
        dropped.opened(num_kept)
    return layout


def _count(folder: Path, texts: Texts, dropped: Dropped) -> None:
    try:
        reasons: dict[str, list[int]] = json.loads((folder / _REASONS).read_bytes())
    except (OSError, ValueError):
        raise UnreadableError(f"{folder} is damaged: delete it, and it is made again.") from None
    for reason, indices in reasons.items():
        for index in indices:
            dropped.missed(int(texts.shards[index]), reason, int(texts.offsets[index]))


@dataclass(eq=False)
class _Making:
    """The ids of samples, as they are made."""

    samples: Samples
    conversation: Conversation
    template: Template
    tokenizer: Bytes | FromFile
    pictures: Sequence[Texts]

    def write(self, folder: Path) -> None:
        texts = self.samples.texts
        say(f"Laying out {len(texts):,} samples ({texts.sizes.sum() / 1e6:.0f} MB of text) once.")
        self.reasons: dict[str, list[int]] = {}
        self.num_cut = 0
        IdFile.write(folder, self._all())
        if self.num_cut:
            say(f"{self.num_cut:,} of {len(texts):,} samples are longer than data.conversation.max_length="
                f"{self.conversation.max_length} and end before it.")
        (folder / _REASONS).write_text(json.dumps(self.reasons))

    def _all(self) -> Iterator[np.ndarray]:
        for first in range(0, len(self.samples), AT_A_TIME):
            indices = range(first, min(first + AT_A_TIME, len(self.samples)))
            parts = [self._parts(index) for index in indices]
            encoded = iter(self._encoded([part.content for of_one in parts for part in of_one
                                          if isinstance(part.content, str)]))
            for index, of_one in zip(indices, parts, strict=True):
                ids = [np.array(part.content if isinstance(part.content, list) else next(encoded), np.uint32)
                       | np.uint32(_TRAINED * part.trained) for part in of_one]
                yield self._cut(index, np.concatenate(ids)) if ids else np.zeros(0, np.uint32)

    def _encoded(self, texts: list[str]) -> Iterator[list[int]]:
        if isinstance(self.tokenizer, Bytes):
            return map(self.tokenizer.encode, texts)
        return self.tokenizer.encode_all(texts)

    def _parts(self, index: int) -> list[Part]:
        """None at all where the sample is refused."""
        squares = [self.conversation.squares.count(*column.sides[index].tolist()) for column in self.pictures
                   if column.sizes[index] >= 0]
        as_laid = self.template.caption if self.conversation.messages_field is None else self.template.messages
        try:
            return as_laid(self.samples.texts[index], squares)
        except Refused as refused:
            self._refuse(index, str(refused))
        except BadSample as bad:
            if isinstance(bad.__cause__, OSError):      # which may pass, and what is made here is kept
                raise
            self._refuse(index, bad.reason)
        return []

    def _cut(self, index: int, ids: np.ndarray) -> np.ndarray:
        """Up to the last token that is trained on: nothing is learnt from what follows. So no sample ends inside a
        picture."""
        trained = np.flatnonzero(ids & _TRAINED)
        within = trained[(trained > 0) & (trained < self.conversation.max_length)]      # nothing foretells the first
        if not len(within):
            self._refuse(index, "longer than max_length before its first answer" if trained.any()
                         else "nothing to train on")
            return ids[:0]
        self.num_cut += bool(within[-1] != trained[-1])
        return ids[:within[-1] + 1]

    def _refuse(self, index: int, reason: str) -> None:
        self.reasons.setdefault(reason, []).append(index)


class Conversations:
    """Samples with "tokens", "trained" and, where they may have pictures, "pictures": see forge.data.

    samples: all of use in the layout, or some of these. pictures: by the name of their field, how they are decoded.
    """

    whole = True

    def __init__(self, layout: Layout, samples: Samples, conversation: Conversation,
                 pictures: Mapping[str, Picture]) -> None:
        self._ids, self._numbers, self._texts = layout.ids, samples.numbers, samples.texts
        self._pictures = [(column, field) for name, field in pictures.items() for column in samples.columns(name)]
        self._squares = conversation.squares
        self.lengths = layout.ids.lengths[samples.numbers]
        self.picture_size = conversation.picture_size if pictures else None
        self.picture_token = layout.template.ids.picture_token
        self.tokens_per_picture = layout.template.tokens_per_picture
        self.fingerprint = f"{layout.fingerprint}-{conversation.fit}-{samples.texts.fingerprint}"

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, index: int) -> Sample:
        """Raises BadSample where a picture is bad."""
        sample = self.without_pictures(index)
        if self.picture_size is not None:
            num_placeholders = int((sample["tokens"] == self.picture_token).sum())
            sample["pictures"] = torch.from_numpy(self._read(index, num_placeholders // self.tokens_per_picture))
        return sample

    def without_pictures(self, index: int) -> Sample:
        if not 0 <= index < len(self):
            raise IndexError(index)
        ids = self._ids[int(self._numbers[index])]
        return {"tokens": torch.from_numpy((ids & ~np.uint32(_TRAINED)).astype(np.int64)),
                "trained": torch.from_numpy(ids >= _TRAINED)}

    def blank(self, index: int) -> Sample:
        """The sample with grey pictures, of which nothing is trained on: what keeps a place in the plan."""
        sample = self.without_pictures(index)
        sample["trained"][:] = False
        count = int((sample["tokens"] == self.picture_token).sum()) // self.tokens_per_picture
        size = self._squares.size
        return sample | {"pictures": torch.full((count, size, size, 3), 128, dtype=torch.uint8)}

    def _read(self, index: int, num_squares: int) -> np.ndarray:
        """[num_squares, size, size, 3] uint8: of the first pictures, as many as have a place."""
        squares = [np.zeros((0, self._squares.size, self._squares.size, 3), np.uint8)]
        left = num_squares
        for data, field in self._pictures:
            if left and data.sizes[index] >= 0:
                try:
                    squares.append(self._squares.cut(data[index], field.policy))
                except BadPicture as bad:
                    raise BadSample(int(data.shards[index]), bad.reason, f"{data.place(index)}: {bad}.") from None
                left -= len(squares[-1])
        if left:
            raise BadSample(int(self._texts.shards[index]), "pictures of other sides than they had when indexed",
                            f"{self._texts.place(index)}: {num_squares} squares have a place and {num_squares - left} "
                            "came.")
        return np.ascontiguousarray(np.concatenate(squares))
