"""data=shapes: rendered pictures of coloured shapes, with questions, answers and captions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING

from forge.data import Split
from forge.data.drawing import encoded, rendered
from forge.data.embedded import conversation, made_shards
from forge.data.pack import Packed, chosen
from forge.data.scenes import CELLS, KINDS, asked_of, drawn

if TYPE_CHECKING:
    from forge.config import Config


@dataclass(frozen=True)
class Shapes:
    """Scenes of one to `most_shapes` shapes, rendered once into shards: JPEG and PNG, a caption, a conversation.

    num_pictures: of both splits together. size: pixels of a picture's side.
    num_questions: about a picture to train on. One that is held out has a single question, so that each answer counts
        by itself.
    heldout: the fraction of arrangements that is held out. What stands where alone decides, so no arrangement is on
        both sides, however it is drawn.
    seed: another one draws other pictures.
    """

    num_pictures: int
    most_shapes: int
    num_questions: int
    size: int
    heldout: float
    seed: int
    shard_mb: int
    tokenizer: str
    cache: str | None

    def made(self, split: Split) -> Iterator[Packed]:
        """The samples of a split, a pure function of the settings."""
        for number in range(self.num_pictures):
            draw = Random(f"{self.seed} {number}")
            scene = drawn(draw, self.most_shapes)
            if chosen(scene.arrangement, self.heldout) != (split == "heldout"):
                continue
            first, *more = asked_of(scene, draw, self.num_questions if split == "train" else 1)
            field = "jpg" if number % 2 else "png"
            yield f"{number:07}", {
                field: encoded(rendered(scene, self.size, draw), field), "txt": scene.caption.encode(),
                "json": conversation(first.question, first.answer, *((each.question, each.answer) for each in more)),
                "cls": str(KINDS.index(first.kind)).encode()}
