"""What is asked of a scene has one answer, which the scene alone decides; and a picture shows what it says."""

import io
import re
from collections import Counter
from random import Random

import numpy as np
import pytest
from PIL import Image

from forge.data.drawing import encoded, rendered
from forge.data.scenes import CELLS, COLOURS, KINDS, SHAPES, SIZES, Scene, Thing, asked_of, drawn

NUMBERS = ("none", "one", "two", "three", "four")
SCENES = [drawn(Random(number), CELLS) for number in range(300)]


def looked_up(scene, question):
    """All that somebody could answer who knows the words and sees the things: another way to the answer."""
    words = re.sub(r"[?.]", "", question).split()
    called = [[thing for thing in scene.things if thing.name == name]
              for name in re.findall(r"(\w+ (?:circle|square|triangle|cross))\b", question)]
    if question.startswith("How many"):
        wanted = {word for word in (*COLOURS, *SHAPES) for told in words if told in (word, word + "s", word + "es")}
        return {NUMBERS[sum(wanted <= {thing.colour, thing.shape} for thing in scene.things)]}
    if question.startswith("What colour"):
        return {thing.colour for thing in scene.things if thing.shape in words}
    if question.startswith("What shape"):
        return {thing.shape for thing in scene.things if thing.colour in words}
    if "small" in words:
        return {thing.size for thing in called[0]}
    axis, before, after = (0, "left", "right") if "left" in words else (1, "above", "below")
    pairs = [(one.place[axis], other.place[axis]) for one in called[0] for other in called[1]]
    return {before if one < other else after if one > other else "neither" for one, other in pairs}


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "caption"])
def test_each_question_has_the_one_answer_that_looking_gives(kind):
    asked = [(scene, each) for scene in SCENES for each in scene.questions(Random(0)) if each.kind == kind]
    assert len(asked) >= 300
    for scene, each in asked:
        assert looked_up(scene, each.question) == {each.answer}, (scene, each)


def test_different_scenes_have_different_captions_but_for_where_things_stand():
    captions = {}
    for scene in SCENES:
        things = tuple((thing.size, thing.colour, thing.shape) for thing in scene.things)
        assert captions.setdefault(scene.caption, things) == things
    lying = Scene((Thing("small", "red", "circle", 1), Thing("large", "blue", "cross", 2)))
    assert lying.caption == "a small red circle above and right of a large blue cross"
    assert Scene(lying.things[:1]).caption == "a small red circle"


def test_no_answer_can_be_guessed():
    """Of each kind with a choice of two, both are as likely, and no answer but a count has more than half."""
    told = {kind: Counter() for kind in KINDS}
    for number in range(2000):
        draw = Random(number)
        for each in asked_of(drawn(draw, 3), draw, 3):
            told[each.kind][each.answer] += 1
    assert all(counter.most_common(1)[0][1] / counter.total() < 0.6 for counter in told.values())
    assert abs(told["size"]["small"] / told["size"].total() - 0.5) < 0.04
    assert all(counter.total() > 600 for counter in told.values())


def test_questions_are_different_ones_and_as_many_as_there_are():
    for number, scene in enumerate(SCENES):
        some, all_of_them = asked_of(scene, Random(number), 3), asked_of(scene, Random(number), 1000)
        assert len({each.question for each in some}) == 3
        assert sorted(all_of_them) == sorted(scene.questions(Random(number)))


@pytest.mark.parametrize("kind", ["png", "jpg"])
def test_a_picture_shows_the_things_where_they_stand_and_as_large(kind):
    for number, scene in enumerate(SCENES[:60]):
        picture = np.asarray(Image.open(io.BytesIO(encoded(rendered(scene, 64, Random(number)), kind)))).astype(int)
        assert picture.shape == (64, 64, 3)
        coloured = picture.max(-1) - picture.min(-1) > 60       # the ground is grey
        areas = {cell: coloured[32 * (cell // 2):, 32 * (cell % 2):][:32, :32].sum() for cell in range(CELLS)}
        assert {cell for cell, area in areas.items() if area > 20} == {thing.cell for thing in scene.things}
        for thing in scene.things:
            # a circle of 0.42 cells has 567 pixels, a cross of 0.22 the fewest, 102
            assert (areas[thing.cell] > 240) == (thing.size == "large"), (thing, areas[thing.cell])


def test_sizes_and_shapes_are_all_drawn():
    assert {thing.size for scene in SCENES for thing in scene.things} == set(SIZES)
    assert {thing.shape for scene in SCENES for thing in scene.things} == set(SHAPES)
