"""How text becomes token ids, and back."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from forge.errors import ConfigError, UnreadableError, UnusableEnvironment

if TYPE_CHECKING:
    from forge.config import Config

BYTES = "bytes"         # the setting that chooses Bytes
AT_A_TIME = 512         # texts that are tokenised in one call: enough for all cores, little memory

# What an end-of-text token is called where no tokenizer_config.json says it: GPT-2, Llama, Qwen, OLMo, T5, BERT.
_END_NAMES = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[SEP]")
_COMPANIONS = ("tokenizer_config.json", "special_tokens_map.json")


class Tokenizer(Protocol):
    """end: the id that follows each document. files: what to carry along where weights go to another program."""

    vocab_size: int
    end: int
    files: tuple[Path, ...]

    def encode(self, text: str) -> list[int]:
        """Ids of the text alone, without `end`; a special token's name inside the text is text."""
        ...

    def decode(self, ids: Sequence[int]) -> str: ...


class Bytes:
    """An id is the value of a UTF-8 byte. A document ends with byte 0, which text does not use."""

    vocab_size = 256
    end = 0
    files: tuple[Path, ...] = ()

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, ids: Sequence[int]) -> str:
        """Ids that are no byte, and bytes that are no UTF-8, become the replacement character."""
        return b"".join(bytes((i,)) if 0 <= i < 256 else b"\xff" for i in ids).decode(errors="replace")


class FromFile:
    """A tokenizer.json, as Hugging Face's `tokenizers` writes it."""

    def __init__(self, path: Path) -> None:
        try:
            import tokenizers
        except ImportError as error:
            raise UnusableEnvironment(f"data.tokenizer={path} needs the package tokenizers: pip install tokenizers, or "
                                      f"use data.tokenizer={BYTES}.") from error
        if not path.is_file():
            raise ConfigError(f"data.tokenizer={path}: there is no such file. Name a tokenizer.json, or {BYTES}.")
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:      # the only class that the package raises
            raise UnreadableError(f"data.tokenizer={path} is not a tokenizer.json ({error}).") from None
        self._tokenizer.encode_special_tokens = True
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.vocab_size: int = max(self._tokenizer.get_vocab(with_added_tokens=True).values()) + 1
        self.end = self._end(path)
        self.files = (path, *(file for name in _COMPANIONS if (file := path.with_name(name)).is_file()))

    def encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def encode_all(self, texts: Sequence[str]) -> Iterator[list[int]]:
        """As `encode`, on all cores."""
        for encoding in self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False):
            yield encoding.ids

    def special_id(self, name: str) -> int | None:
        """The id of a token by its name."""
        number = self._tokenizer.token_to_id(name)
        return None if number is None else int(number)

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False))

    def _end(self, path: Path) -> int:
        for name in (_configured_end(path.with_name("tokenizer_config.json")), *_END_NAMES):
            if name is not None and (token := self.special_id(name)) is not None:
                return token
        raise ConfigError(f"data.tokenizer={path} has no token that ends a text: name one as eos_token in a "
                          f"tokenizer_config.json beside it (looked for {', '.join(_END_NAMES)}).")


def _configured_end(path: Path) -> str | None:
    try:
        named: Any = json.loads(path.read_text("utf-8"))["eos_token"]
        return str(named["content"]) if isinstance(named, dict) else named if isinstance(named, str) else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def open_tokenizer(setting: str | None) -> Bytes | FromFile:
    """The tokenizer of a `data.tokenizer` setting. Raises ForgeError."""
    if setting is None:
        raise ConfigError("data.tokenizer=null: ids alone cannot be told as text, nor text as ids. Set it to the "
                          "tokenizer.json that the ids were made with.")
    return Bytes() if setting == BYTES else FromFile(Path(setting).expanduser())


def vocabulary_problems(setting: str, config: Config) -> Iterator[str]:
    """Ids that the model has no embedding for would end a run inside a kernel, far from the reason."""
    try:
        size = open_tokenizer(setting).vocab_size
    except ConfigError as error:
        yield str(error)
        return
    if config.model.vocab_size < size:
        yield (f"data.tokenizer={setting} has {size} tokens and model.vocab_size={config.model.vocab_size}: "
               f"set model.vocab_size={size}")
