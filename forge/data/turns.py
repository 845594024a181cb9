"""Samples taken apart into what becomes of them: text, special tokens, and the places of pictures.

What is trained on follows from this structure alone. Special tokens are never looked for in text: whoever writes
<|im_end|> in a message has written these characters.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

MARK = "<image>"        # in a user's message: the place of a picture, as in LLaVA's data
ROLES = ("system", "user", "assistant", "tool")
_ANSWERS = "assistant"


class Refused(Exception):
    """Why a sample is of no use; of few kinds, so that it can be counted."""


class SpecialIds(NamedTuple):
    """picture_token: the placeholder that stands for a picture's features."""

    picture_token: int
    turn_start: int
    turn_end: int


class Part(NamedTuple):
    """Text, or the ids of special tokens; and whether it is trained on."""

    content: str | list[int]
    trained: bool


@dataclass(frozen=True)
class Template:
    """How samples are laid out. end: the id behind a caption. tokens_per_picture: placeholders of a square."""

    ids: SpecialIds
    end: int
    tokens_per_picture: int

    def caption(self, text: bytes, squares: Sequence[int]) -> list[Part]:
        """The pictures, then the text and the end. squares: how many each picture has."""
        return [*map(self._run, squares), Part(_plain(text.decode("utf-8", "replace")), True), Part([self.end], True)]

    def messages(self, text: bytes, squares: Sequence[int]) -> list[Part]:
        """ChatML: <|im_start|>ROLE, a new line, the content and <|im_end|>, with a new line between turns. Answers and
        the <|im_end|> behind them are trained on. A mark in a user's turn is the place of the next picture; where there
        are none, the pictures stand before what the user says first. Raises Refused."""
        turns = _with_marks(_turns(text), len(squares))
        runs = iter([self._run(count) for count in squares])
        parts: list[Part] = []
        for role, content in turns:
            answer = role == _ANSWERS
            parts += [Part("\n", False)] if parts else []
            parts += [Part([self.ids.turn_start], False), Part(f"{role}\n", False)]
            first, *others = content.split(MARK) if role == "user" else [content]
            parts.append(Part(first, answer))
            for other in others:
                parts += [next(runs), Part(other, answer)]
            parts.append(Part([self.ids.turn_end], answer))
        return parts

    def _run(self, squares: int) -> Part:
        return Part([self.ids.picture_token] * (squares * self.tokens_per_picture), False)


def _with_marks(turns: list[tuple[str, str]], num_pictures: int) -> list[tuple[str, str]]:
    """Turns with one mark a picture. Raises Refused."""
    asked = [number for number, (role, _) in enumerate(turns) if role == "user"]
    num_marks = sum(turns[number][1].count(MARK) for number in asked)
    if num_marks == 0 and num_pictures and asked:
        role, content = turns[asked[0]]
        turns[asked[0]] = role, MARK * num_pictures + content
    elif num_marks != num_pictures:
        raise Refused("another number of pictures than of places for them")
    return turns


def _turns(text: bytes) -> list[tuple[str, str]]:
    """(role, content) of each. Raises Refused."""
    try:
        read = json.loads(text.decode("utf-8", "replace"))
    except (ValueError, RecursionError):
        raise Refused("messages that are no JSON") from None
    messages = read.get("messages") if isinstance(read, dict) else None
    if not isinstance(messages, list) or not messages:
        raise Refused("no messages")
    return [_turn(message) for message in messages]


def _turn(message: Any) -> tuple[str, str]:
    role, content = (message.get(name) for name in ("role", "content")) if isinstance(message, dict) else (None, None)
    if role not in ROLES:
        raise Refused(f"a role that is none of {', '.join(ROLES)}")
    if not isinstance(content, str):
        raise Refused("a message without text")
    return role, _plain(content)


def _plain(text: str) -> str:
    """Half a surrogate, which JSON can hold, is no character; and byte 0 is how text of bytes ends."""
    return text.encode("utf-8", "replace").decode().replace("\0", "\ufffd")
