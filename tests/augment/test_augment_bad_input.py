"""What is wrong with a recipe is said before anything runs, with the setting, the value and the mend."""

from types import SimpleNamespace

import pytest
from augment.recipes import PARTS, recipe

from forge.augment.recipe import Affine, Color, Crop, Flip
from forge.composition import training_settings
from forge.config import realise
from forge.errors import ConfigError

VISION = SimpleNamespace(image_size=16, mean=[0.5, 0.4, 0.3], std=[0.5, 0.6, 0.7])
CHOICES = {"augment": "gpu", "model": "vlm_tiny"}


def problems(option, vision=VISION):
    return list(option.problems(SimpleNamespace(model=SimpleNamespace(vision=vision), choices=CHOICES)))


@pytest.mark.parametrize("parts, said", [
    ({"crop": Crop(1.1, [0.1, 1.0], [1.0, 1.0])}, "augment.crop.p=1.1: from 0 to 1"),
    ({"crop": Crop(1.0, [0.0, 1.0], [1.0, 1.0])}, "augment.crop.scale=[0.0, 1.0]: [from, to] is wanted, above 0 and"),
    ({"crop": Crop(1.0, [0.5, 1.5], [1.0, 1.0])}, "augment.crop.scale=[0.5, 1.5]"),
    ({"crop": Crop(1.0, [0.5, 1.0], [1.0])}, "augment.crop.ratio=[1.0]: [from, to] is wanted, above 0, the smaller"),
    ({"flip": Flip(-0.1)}, "augment.flip.p=-0.1"),
    ({"affine": Affine(0.5, 200.0, 0.1, [0.9, 1.1], 5.0)}, "augment.affine.degrees=200.0: from 0 to 180"),
    ({"affine": Affine(0.5, 10.0, 0.1, [1.1, 0.9], 5.0)}, "augment.affine.scale=[1.1, 0.9]"),
    ({"affine": Affine(0.5, 10.0, 0.1, [0.9, 1.1], 90.0)}, "augment.affine.shear=90.0: from 0 to 89"),
    ({"color": Color(0.8, -0.4, 0.4, 0.4, 0.1)}, "augment.color.brightness=-0.4: 0 or more"),
    ({"color": Color(0.8, 0.4, 0.4, 0.4, 0.6)}, "augment.color.hue=0.6: from 0 to 0.5")], ids=str)
def test_numbers(parts, said):
    found = problems(recipe(**parts))
    assert len(found) == 1 and found[0].startswith(said), found


def test_what_fits_has_no_problem():
    assert not problems(recipe()) and not problems(recipe(path="kornia"))
    assert not problems(recipe(affine=Affine(0.0, 0.0, 0.0, [1.0, 1.0], 0.0), color=Color(0.0, 5.0, 0.0, 0.0, 0.5)))


def test_a_model_that_is_evaluated_on_other_pictures():
    found = problems(recipe(size=24))
    assert found == ["augment.size=24 is not model.vision.image_size=16, with which the model is evaluated: leave "
                     "augment.size as it is, or set both."]
    assert "augment.std" in problems(recipe(), SimpleNamespace(**{**vars(VISION), "std": [1.0, 1.0, 1.0]}))[0]


def test_a_model_without_pictures():
    assert "takes none: choose a model that does" in problems(recipe(), None)[0]
    with pytest.raises(ConfigError, match=r"augment.size takes its value from model.vision.image_size, which "
                                          r"model=moe_tiny does not have: choose another model"):
        realise(training_settings(["augment=gpu", "run_dir=x"]))


def test_kornia_that_is_not_there(monkeypatch):
    monkeypatch.setattr("forge.augment.recipe.find_spec", lambda name: None)
    assert "pip install 'forge-switchboard[kornia]'" in problems(recipe(path="kornia"))[0]
    assert not problems(recipe(**PARTS))
