"""Blocks of turns, in an order that mirrors itself: A B B A, or A B C C B A."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

Name = TypeVar("Name")


@dataclass(frozen=True)
class Turn:
    """What a side did in one turn.

    lengths: ms of each step that counts. tokens: targets trained on in them. phases: ms of each phase in them, summed.
    peak_memory: bytes, since the side began. disturbances: why the turn says nothing (a recompilation ...).
    """

    lengths: list[float]
    settling: list[float]
    tokens: float
    phases: dict[str, float]
    wall_seconds: float
    peak_memory: int | None
    disturbances: list[str]

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return self.tokens / sum(self.lengths) * 1e3


class Side(Protocol):
    @property
    def name(self) -> str: ...

    def turn(self) -> Turn: ...


@dataclass
class Block:
    """One turn or two of every side, by name, in the order they were taken."""

    order: list[str] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)

    def rate(self, name: str) -> float:
        """Tokens a second over the turns of one side."""
        mine = [turn for other, turn in zip(self.order, self.turns, strict=True) if other == name]
        return sum(turn.tokens for turn in mine) / sum(sum(turn.lengths) for turn in mine) * 1e3

    def log_ratio(self, name: str, over: str) -> float:
        return math.log(self.rate(name) / self.rate(over))

    @property
    def disturbances(self) -> list[str]:
        return [f"{name}: {why}" for name, turn in zip(self.order, self.turns, strict=True)
                for why in turn.disturbances]

    def record(self) -> dict[str, Any]:
        """Everything that was measured, for result.json."""
        return {"order": self.order, "disturbances": self.disturbances, "turns": [vars(turn) for turn in self.turns]}


def mirrored(names: Sequence[Name]) -> list[Name]:
    """Each twice, the second time in reverse: what drifts evenly adds the same to all."""
    return [*names, *reversed(names)]


def take_blocks(sides: Sequence[Side], blocks: int, spare: int,
                told: Callable[[int, str], None]) -> list[Block]:
    """So many undisturbed blocks of the sides, or as many as `spare` more attempts allow; disturbed ones come along.

    told: hears of each turn (number of the block, name of the side) before it is taken.
    """
    taken: list[Block] = []
    while len(undisturbed(taken)) < blocks and len(taken) < blocks + spare:
        block = Block()
        for side in mirrored(sides):
            told(len(taken), side.name)
            block.order.append(side.name)
            block.turns.append(side.turn())
        taken.append(block)
    return taken


def undisturbed(blocks: Sequence[Block]) -> list[Block]:
    return [block for block in blocks if not block.disturbances]
