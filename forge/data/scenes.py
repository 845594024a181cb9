"""Scenes of coloured shapes: what a picture shows, what may be asked of it, and the one right answer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import permutations
from random import Random
from typing import NamedTuple

SHAPES = ("circle", "square", "triangle", "cross")
COLOURS = ("red", "green", "blue", "yellow", "purple")
SIZES = ("small", "large")
KINDS = ("colour", "shape", "size", "count", "relation", "caption")
SIDE = 2                # cells in a row of the grid; each holds one thing at most, so none hides another
CELLS = SIDE * SIDE
_NUMBERS = ("none", "one", "two", "three", "four")


class Asked(NamedTuple):
    """kind: of KINDS."""

    kind: str
    question: str
    answer: str


@dataclass(frozen=True)
class Thing:
    """cell: counted in reading order."""

    size: str
    colour: str
    shape: str
    cell: int

    @property
    def name(self) -> str:
        return f"{self.colour} {self.shape}"

    @property
    def place(self) -> tuple[int, int]:
        """(column, row)"""
        return self.cell % SIDE, self.cell // SIDE


@dataclass(frozen=True)
class Scene:
    """Things in the order of their cells."""

    things: tuple[Thing, ...]

    @property
    def arrangement(self) -> str:
        """All that a question can be about: two pictures with one arrangement have the same answers."""
        return "; ".join(f"{thing.size} {thing.name} at {thing.cell}" for thing in self.things)

    @property
    def caption(self) -> str:
        named = [f"a {thing.size} {thing.name}" for thing in self.things]
        if len(named) == 2:
            return f"{named[0]} {_lies(*self.things)} {named[1]}"
        return ", ".join(named[:-1]) + (" and " if named[:-1] else "") + named[-1]

    def questions(self, draw: Random) -> list[Asked]:
        """All that are asked of the scene. Each names what is there once only; `draw` says what absent things are
        counted."""
        return [*self._of_single_things(), *self._counts(draw), *self._relations(),
                Asked("caption", "Describe the picture.", self.caption)]

    def _of_single_things(self) -> Iterator[Asked]:
        for thing in self.things:
            if self._num(shape=thing.shape) == 1:
                yield Asked("colour", f"What colour is the {thing.shape}?", thing.colour)
            if self._num(colour=thing.colour) == 1:
                yield Asked("shape", f"What shape is the {thing.colour} one?", thing.shape)
            if self._num(colour=thing.colour, shape=thing.shape) == 1:
                yield Asked("size", f"Is the {thing.name} small or large?", thing.size)

    def _counts(self, draw: Random) -> Iterator[Asked]:
        yield Asked("count", "How many shapes are there?", _NUMBERS[len(self.things)])
        for name, words in (("shape", SHAPES), ("colour", COLOURS)):
            there = [word for word in words if self._num(**{name: word})]
            absent = [word for word in words if word not in there]
            for word in there + ([draw.choice(absent)] if absent else []):
                several = f"{word} shapes" if name == "colour" else "crosses" if word == "cross" else f"{word}s"
                yield Asked("count", f"How many {several} are there?", _NUMBERS[self._num(**{name: word})])

    def _relations(self) -> Iterator[Asked]:
        single = [thing for thing in self.things if self._num(colour=thing.colour, shape=thing.shape) == 1]
        for one, other in permutations(single, 2):
            for axis, (before, after) in enumerate((("left", "right"), ("above", "below"))):
                if one.place[axis] != other.place[axis]:
                    tail = " of" if axis == 0 else ""
                    yield Asked("relation", f"Is the {one.name} {before} or {after}{tail} the {other.name}?",
                                before if one.place[axis] < other.place[axis] else after)

    def _num(self, **wanted: str) -> int:
        return sum(all(getattr(thing, name) == word for name, word in wanted.items()) for thing in self.things)


def _lies(one: Thing, other: Thing) -> str:
    """How `one`, which comes first in reading order, lies to the other."""
    (column, row), (other_column, other_row) = one.place, other.place
    down = ["above"] if row < other_row else []
    across = [] if column == other_column else ["left of" if column < other_column else "right of"]
    return " and ".join(down + across)


def drawn(draw: Random, most: int) -> Scene:
    """A scene of one to `most` things, each number as likely."""
    cells = sorted(draw.sample(range(CELLS), draw.randint(1, most)))
    return Scene(tuple(Thing(draw.choice(SIZES), draw.choice(COLOURS), draw.choice(SHAPES), cell) for cell in cells))


def asked_of(scene: Scene, draw: Random, number: int) -> list[Asked]:
    """So many different questions, or all where there are fewer; each kind that the scene has is as likely."""
    left: dict[str, list[Asked]] = {}
    for asked in scene.questions(draw):
        left.setdefault(asked.kind, []).append(asked)
    chosen: list[Asked] = []
    while left and len(chosen) < number:
        kind = draw.choice(sorted(left))
        chosen.append(left[kind].pop(draw.randrange(len(left[kind]))))
        if not left[kind]:
            del left[kind]
    return chosen
