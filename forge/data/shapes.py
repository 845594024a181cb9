"""data=shapes: rendered pictures of coloured shapes, with questions, answers and captions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, Literal

from forge.data import Split
from forge.data.drawing import encoded, rendered
from forge.data.embedded import Embedded, about_a_picture
from forge.data.pack import Packed, chosen
from forge.data.scenes import CELLS, KINDS, asked_of, drawn

if TYPE_CHECKING:
    from forge.config import Config


@dataclass(frozen=True)
class Shapes(Embedded):
    """Pictures of one to `most_shapes` shapes. See Embedded.

    num_pictures: of both splits together. num_questions: about a picture to train on; one that is held out has a single
    question, so that each answer counts by itself. formats: of the files, in turn. seed: another one draws other
    pictures.

    What stands where alone decides what is held out, so no arrangement is on both sides, however it is drawn.
    """

    num_pictures: int
    most_shapes: int
    num_questions: int
    formats: list[Literal["png", "jpg"]]
    seed: int

    name = "shapes"
    kinds = KINDS

    def made(self, split: Split) -> Iterator[Packed]:
        for number in range(self.num_pictures):
            draw = Random(f"{self.seed} {number}")
            scene = drawn(draw, self.most_shapes)
            if chosen(scene.arrangement, self.heldout) != (split == "heldout"):
                continue
            asked = asked_of(scene, draw, self.num_questions if split == "train" else 1)
            field = self.formats[number % len(self.formats)]
            yield f"{number:07}", {
                field: encoded(rendered(scene, self.size, draw), field), "txt": scene.caption.encode(),
                "json": about_a_picture([(each.question, each.answer) for each in asked]),
                "cls": str(KINDS.index(asked[0].kind)).encode()}

    def problems(self, config: Config) -> Iterator[str]:
        yield from super().problems(config)
        for setting in ("num_pictures", "num_questions"):
            if getattr(self, setting) < 1:
                yield f"data.{setting}={getattr(self, setting)}: at least 1 is wanted"
        if not self.formats:
            yield "data.formats=[]: name png, jpg or both"
        if not 1 <= self.most_shapes <= CELLS:
            yield f"data.most_shapes={self.most_shapes}: a picture has room for 1 to {CELLS}"
