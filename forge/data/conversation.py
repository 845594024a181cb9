"""The setting `conversation` of data options: text, pictures and answers as the tokens of one sample."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from forge.data.squares import Squares
from forge.data.tokenizer import Bytes, FromFile, open_tokenizer
from forge.data.turns import SpecialIds, Template
from forge.errors import ConfigError, ForgeError

if TYPE_CHECKING:
    from forge.config import Config


@dataclass(frozen=True)
class Conversation:
    """A sample is the turns of a conversation, of which the answers are trained on, or pictures and their caption.

    messages_field: the field that holds {"messages": [{"role", "content"}, ...]}; None: captions, in data.text_field.
    picture_size, max_tiles, fit: see forge.data.squares.Squares.
    tokens_per_picture: places that one square takes among the tokens.
    max_length: tokens of a sample. What comes later is left out, and with it the pictures there.
    picture_token, turn_start, turn_end: what these tokens are called in a tokenizer.json. With tokenizer=bytes they are
        256, 257 and 258, whatever they are called.
    """

    messages_field: str | None
    picture_size: int
    tokens_per_picture: int
    max_tiles: int
    fit: Literal["squash", "crop", "pad"]
    max_length: int
    picture_token: str
    turn_start: str
    turn_end: str

    @property
    def squares(self) -> Squares:
        return Squares(self.picture_size, self.max_tiles, self.fit)

    def template(self, tokenizer: Bytes | FromFile) -> Template:
        """Raises ConfigError where the tokenizer lacks one of the tokens."""
        return Template(self.special_ids(tokenizer), tokenizer.end, self.tokens_per_picture)

    def special_ids(self, tokenizer: Bytes | FromFile) -> SpecialIds:
        """Raises ConfigError where the tokenizer lacks one of the tokens, or makes it of text as well; and where it
        adds to the parts of a conversation, which are encoded one by one."""
        if isinstance(tokenizer, Bytes):
            return SpecialIds(tokenizer.vocab_size, tokenizer.vocab_size + 1, tokenizer.vocab_size + 2)
        apart = tokenizer.decode([*tokenizer.encode("user"), *tokenizer.encode("is")])
        if apart != tokenizer.decode(tokenizer.encode("useris")):
            raise ConfigError(f"data.tokenizer={tokenizer.files[0]} makes {apart!r} of the parts 'user' and 'is': it "
                              "would add a space before each part of a conversation. Take one that does not (in a "
                              "tokenizer.json: \"prepend_scheme\": \"never\", \"add_prefix_space\": false).")
        return SpecialIds(*(self._special_id(tokenizer, setting) for setting in SpecialIds._fields))

    def problems(self, tokenizer: str, with_pictures: bool, config: Config) -> Iterator[str]:
        """with_pictures: whether samples may have any. What is wrong with the tokenizer itself is not said here."""
        for name, value in (("picture_size", self.picture_size), ("tokens_per_picture", self.tokens_per_picture),
                            ("max_tiles", self.max_tiles)):
            if value < 1:
                yield f"data.conversation.{name}={value}: at least 1 is wanted"
        if not 2 <= self.max_length <= config.sequence_length:
            yield (f"data.conversation.max_length={self.max_length}: a sample is at least 2 tokens, and fits into a "
                   f"row of sequence_length={config.sequence_length}; it is never cut in two")
        elif with_pictures and self.tokens_per_picture >= self.max_length:
            yield (f"data.conversation.tokens_per_picture={self.tokens_per_picture} leaves no room for text in "
                   f"data.conversation.max_length={self.max_length}: raise it, and sequence_length")
        try:
            ids = self.special_ids(open_tokenizer(tokenizer))
        except ConfigError as error:
            yield str(error)
            return
        except ForgeError:
            return
        if max(ids) >= config.model.vocab_size:
            yield (f"data.tokenizer={tokenizer} has ids up to {max(ids)} in conversations and model.vocab_size="
                   f"{config.model.vocab_size}: set model.vocab_size={max(ids) + 1}")
        if with_pictures:
            yield from self._problems_of_the_model(ids, config)

    def _problems_of_the_model(self, ids: SpecialIds, config: Config) -> Iterator[str]:
        vision = getattr(config.model, "vision", None)
        if vision is None:
            yield (f"model={config.choices.get('model')} takes no pictures, and data.pictures names some: set "
                   "model=vlm_tiny, for example, or data.pictures=null")
            return
        if vision.tokens_per_picture != self.tokens_per_picture:
            yield (f"data.conversation.tokens_per_picture={self.tokens_per_picture} and the model makes "
                   f"{vision.tokens_per_picture} of a picture (model.vision): set the former to that")
        token = getattr(config.model, "picture_token", ids.picture_token)
        if token != ids.picture_token:
            yield (f"model.picture_token={token} and the data's picture token is {ids.picture_token}: "
                   f"set model.picture_token={ids.picture_token}")

    def _special_id(self, tokenizer: FromFile, setting: str) -> int:
        name = getattr(self, setting)
        number = tokenizer.special_id(name)
        if number is None:
            raise ConfigError(f"data.conversation.{setting}={name} is no token of data.tokenizer={tokenizer.files[0]}: "
                              "name one that it has, or add it there as a special token.")
        if number in tokenizer.encode(name):
            raise ConfigError(f"data.conversation.{setting}={name} is no special token of data.tokenizer="
                              f"{tokenizer.files[0]}, so text that holds these characters would be taken for it: mark "
                              "it \"special\": true among that file's added_tokens.")
        return number
