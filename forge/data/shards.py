"""data=shards: samples in WebDataset tar shards."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from forge.data import NAMES, Split
from forge.data.conversation import Conversation
from forge.data.disk import cache_folder
from forge.data.dropping import Bound, Dropped
from forge.data.fields import Array, Field, Label, Picture, Text
from forge.data.hashing import held_out, stirred
from forge.data.naming import KeyDot
from forge.data.reading import Reading
from forge.data.samples import Samples, open_samples
from forge.data.staging import Staging
from forge.data.storage import Location, inside, is_remote, located, matching, status
from forge.data.texts import Texts
from forge.data.tokenizer import open_tokenizer, vocabulary_problems
from forge.errors import ConfigError, ForgeError

if TYPE_CHECKING:
    from pathlib import Path

    from forge.config import Config
    from forge.data.conversations import Conversations
    from forge.data.source import ByteSource, SampleSource, TokenSource

_Named = str | dict[str, str] | None


@dataclass(frozen=True)
class Shards:
    """Samples from local or mounted folders, or from what fsspec opens.

    train, heldout: a folder of .tar files, or a pattern ("data/{000..041}.tar", "data/*.tar"); or several of these,
        each with a name.
    weights: in which proportion the named sets of shards in `train` are mixed; None: every sample once an epoch.
    heldout_fraction: where heldout is None, the fraction of the samples in `train` that is held out. A sample's
        text alone decides, of a conversation its first picture, so the copies of either are on one side.
    tokenizer: "bytes", or the path of a tokenizer.json.
    text_field: the field of a sample that holds its text, or several, of which the first that is there is taken
        ("txt;caption").
    pictures, labels, arrays: other fields, each with the name that it has in a sample. Of a conversation, `pictures`
        are those that have a place in it, in this order. All others reach no batch of forge's own, and a run that names
        them is refused.
    conversation: None: a sample is its text, and its other fields.
    key_dot: where the key of a sample ends in a member's name: at the first dot, as in webdataset, or at the last.
    keep_empty, invalid_utf8: see forge.data.fields.Text.
    shuffle_shards: shards whose samples are mixed at a time; None: all.
    max_bad, bad_floor: see forge.data.dropping.Bound.
    staging: copies of shards on a local disk, see forge.data.staging; None: shards are read where they lie.
    cache: folder for what is derived from shards (token ids; indices of shards in folders that cannot be written);
        None: the user's cache folder.
    """

    train: _Named
    heldout: _Named
    weights: dict[str, float] | None
    heldout_fraction: float
    tokenizer: str
    text_field: str
    pictures: dict[str, Picture] | None
    labels: dict[str, Label] | None
    arrays: dict[str, Array] | None
    conversation: Conversation | None
    key_dot: KeyDot
    keep_empty: bool
    invalid_utf8: Literal["keep", "drop"]
    shuffle_shards: int | None
    max_bad: float
    bad_floor: int
    staging: Staging | None
    cache: str | None

    def open(self, split: Split) -> SampleSource:
        from forge.data.source import SampleSource  # here, because it imports torch

        cache = cache_folder(self.cache)
        own = split == "heldout" and self.heldout is not None
        streams = named_shards(self.heldout, "data.heldout") if own else named_shards(self.train, "data.train")
        dropped = Dropped([path for shards in streams.values() for path in shards],
                          Bound(self.max_bad, self.bad_floor))
        samples = open_samples(streams, self._text(), self._others(), self.key_dot, dropped, cache)
        staged = self.staging.open(cache) if self.staging is not None and split == "train" else None
        if staged is not None:
            samples = samples.copied(staged.copies)
        if not own:
            self._require_pictures(samples)
        samples, tokens = self._tokens(samples, dropped, cache, split if self.heldout is None else None)
        reading = self._reading(samples, list(streams), split)
        if staged is not None:
            staged.follow(samples, reading.order, self.shuffle_shards or len(dropped.shards))
        return SampleSource(samples, tokens, self._decoded(), reading, dropped, staged)

    def _tokens(self, samples: Samples, dropped: Dropped, cache: Path,
                side: Split | None) -> tuple[Samples, ByteSource | TokenSource | Conversations]:
        """The samples that can be trained on, on one side of those that are held out (None: all), and their tokens."""
        tokenizer = open_tokenizer(self.tokenizer)
        if self.conversation is None:
            from forge.data.source import open_source

            samples = self._on(side, samples)
            return samples, open_source(samples.texts, tokenizer, cache)
        from forge.data.conversations import Conversations, open_layout

        layout = open_layout(samples, self.conversation, tokenizer, self.pictures or {}, dropped, cache)
        samples = self._on(side, samples.selected(layout.ids.lengths > 0))
        return samples, Conversations(layout, samples, self.conversation, self.pictures or {})

    def problems(self, config: Config) -> Iterator[str]:
        settings = {"data.train": self.train} | ({"data.heldout": self.heldout} if self.heldout is not None else {})
        for name, value in settings.items():
            try:
                named_shards(value, name)
            except ForgeError as error:
                yield str(error)
        if self.heldout is None and not 0 < self.heldout_fraction < 1:
            yield (f"data.heldout_fraction={self.heldout_fraction} is no fraction between 0 and 1: "
                   "set it to 0.05, or name shards in data.heldout")
        if self.shuffle_shards is not None and self.shuffle_shards < 1:
            yield f"data.shuffle_shards={self.shuffle_shards}: at least 1 is wanted, or null to shuffle all"
        if not 0 <= self.max_bad <= 1:
            yield f"data.max_bad={self.max_bad} is no share: set it to 0.05, for example"
        if self.bad_floor < 0:
            yield f"data.bad_floor={self.bad_floor}: 0 or more is wanted"
        if self.staging is not None:
            yield from self.staging.problems(self.shuffle_shards)
        yield from self._problems_of_weights()
        yield from self._problems_of_texts()
        yield from self._problems_of_fields()
        yield from self._problems_of_idle_fields(config)
        yield from vocabulary_problems(self.tokenizer, config)
        if self.conversation is not None:
            yield from self.conversation.problems(self.tokenizer, bool(self.pictures), config)

    def _problems_of_weights(self) -> Iterator[str]:
        names = set(self.train) if isinstance(self.train, dict) else set()
        if self.weights and set(self.weights) != names:
            yield (f"data.weights names {', '.join(sorted(self.weights))} and data.train names "
                   f"{', '.join(sorted(names)) or 'no sets of shards'}: give each set of data.train={{name: shards}} "
                   "its weight, and no other")
        for name, weight in (self.weights or {}).items():
            if weight <= 0:
                yield f"data.weights.{name}={weight}: more than 0 is wanted; leave out of data.train what is not"

    def _problems_of_texts(self) -> Iterator[str]:
        talk = self.conversation.messages_field if self.conversation is not None else None
        for setting, names in (("text_field", self.text_field), ("conversation.messages_field", talk)):
            if names is not None and "*" in names:
                yield f"data.{setting}={names} may be many fields: name one, or several with ; of which one is taken"

    def _problems_of_fields(self) -> Iterator[str]:
        for name in self._others():
            if name in NAMES:
                yield f"a field cannot be called {name}, as a batch has other things of that name: choose another name"
        if len(self._others()) < sum(len(each or {}) for each in (self.pictures, self.labels, self.arrays)):
            yield "data.pictures, data.labels and data.arrays share a name: give each field a name of its own"
        for name, label in (self.labels or {}).items():
            if label.classes < 1:
                yield f"data.labels.{name}.classes={label.classes}: at least 1 is wanted"
        for name, field in self._decoded().items():
            if "*" in field.names:
                yield f"the field {name} cannot be all of {field.names}: several pictures are for data.conversation"
        for name, picture in (self.pictures or {}).items():
            if picture.max_pixels < 1:
                yield f"data.pictures.{name}.max_pixels={picture.max_pixels}: at least 1 is wanted"

    def _problems_of_idle_fields(self, config: Config) -> Iterator[str]:
        """Fields that would be read, checked and thrown away: see forge.batching.Batching."""
        pictures = {} if self.conversation is not None else {"pictures": self.pictures}
        for setting, fields in {"labels": self.labels, "arrays": self.arrays, **pictures}.items():
            if fields and not getattr(config.batching, "takes_fields", False):
                place = ", or data.conversation, in which pictures have a place" if setting == "pictures" else ""
                yield (f"data.{setting} names {', '.join(fields)}, of which no batch has anything and no model learns: "
                       f"set data.{setting}=null{place}")

    def _text(self) -> Text:
        messages = None if self.conversation is None else self.conversation.messages_field
        if messages is None:
            return Text(self.text_field, self.keep_empty, self.invalid_utf8)
        return Text(messages, self.keep_empty, self.invalid_utf8, "data.conversation.messages_field")

    def _decoded(self) -> dict[str, Field]:
        """The fields that a sample has beside its tokens. Pictures of a conversation come with these."""
        return self._others() if self.conversation is None else {**(self.labels or {}), **(self.arrays or {})}

    def _others(self) -> dict[str, Field]:
        return {**(self.pictures or {}), **(self.labels or {}), **(self.arrays or {})}

    def _reading(self, samples: Samples, names: list[str], split: Split) -> Reading:
        wanted = self.weights if self.weights and split == "train" else None
        for stream, name in enumerate(names if wanted else []):
            if not (samples.streams == stream).any():
                raise ConfigError(f"data.train.{name} has no samples to train on, and data.weights wants it: leave it "
                                  "out of both.")
        weights = None if wanted is None else tuple(wanted[name] for name in names)
        return Reading(samples.texts.shards, samples.streams, weights, self.shuffle_shards)

    def _require_pictures(self, samples: Samples) -> None:
        for name, picture in (self.pictures or {}).items() if self.conversation is not None else ():
            if not any((column.sizes >= 0).any() for column in samples.columns(name)):
                raise ConfigError(f"No sample in data.train={self.train} has data.pictures.{name}.names="
                                  f"{picture.names}: name fields that they have (`python -m forge.shards info PATH` "
                                  f"lists them), or leave {name} out.")

    def _on(self, side: Split | None, samples: Samples) -> Samples:
        if side is None:
            return samples
        if len(samples) < 2:
            raise ConfigError(f"data.train={self.train} has a single sample, so none can be held out: "
                              "name other shards in data.heldout.")
        shown = samples.shown(self.pictures or {}) if self.conversation is not None else samples.texts
        return samples.selected(self._held_out(shown) == (side == "heldout"))

    def _held_out(self, deciding: Texts) -> np.ndarray:
        """[samples] bool, at least one of each."""
        both = deciding.checksums.astype(np.uint64) << np.uint64(32) | deciding.sizes.astype(np.uint64)
        return held_out(stirred(both), self.heldout_fraction)


def named_shards(setting: _Named, name: str) -> dict[str, list[Location]]:
    """The shards of each set that a setting names; one without a name is called "". Raises ForgeError."""
    if isinstance(setting, dict):
        if not setting:
            raise ConfigError(f"{name} names no shards: give it at least one name with a folder of .tar files.")
        return {each: shard_paths(value, f"{name}.{each}") for each, value in setting.items()}
    return {"": shard_paths(setting, name)}


def shard_paths(setting: str | None, name: str) -> list[Location]:
    """The shards that a folder or pattern names, sorted. Raises ForgeError where there are none."""
    if setting is None:
        raise ConfigError(f"{name} names no shards: set it to a folder of .tar files; "
                          "`python -m forge.shards make FOLDER OUT` makes them from a folder of text.")
    path = located(setting)
    there = inside(path, ".tar")
    paths = matching(setting) if there is None else there
    if paths:
        return paths
    if not is_remote(setting) and inside(located(f"{setting}/train"), ".tar") is not None:
        raise ConfigError(f"{name}={setting} holds no .tar files, but folders: set data.train={path}/train "
                          f"and data.heldout={path}/heldout.")
    what = "does not exist" if there is None and not _exists(path) else "holds no .tar files"
    raise ConfigError(f"{name}={setting} {what}: name a folder or pattern of shards; "
                      "`python -m forge.shards make FOLDER OUT` makes them from a folder of text.")


def _exists(path: Location) -> bool:
    try:
        status(path)
    except OSError:
        return False
    return True
