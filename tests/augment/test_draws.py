"""What is drawn: a function of the picture's seed alone, distributed as kornia and torchvision draw."""

import dataclasses
import math

import pytest
import torch
from augment.recipes import PARTS, noise, only, recipe, seen

from forge.augment.draws import drawn, uniform
from forge.augment.recipe import Crop

NUM = 20_000
# Two samples of NUM of one distribution lie farther apart, by Kolmogorov and Smirnov, once in a million.
APART = math.sqrt(-math.log(1e-6 / 2) / 2) * math.sqrt(2 / NUM)
SIDE, SIZE = 96, 32


def splitmix64(seed, num):
    """In Python's integers, which have no sign and no end."""
    mask = 2**64 - 1
    for number in range(1, num + 1):
        mixed = (seed + number * 0x9E3779B97F4A7C15) & mask
        mixed = ((mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9) & mask
        mixed = ((mixed ^ mixed >> 27) * 0x94D049BB133111EB) & mask
        yield (mixed ^ mixed >> 31) >> 11


def test_numbers_are_splitmix64_of_seed_and_place():
    seeds = [0, 1, -1, 2**63 - 1, -2**63, 123456789]
    expected = [[number / 2**53 for number in splitmix64(seed % 2**64, 7)] for seed in seeds]
    assert uniform(torch.tensor(seeds), 7).tolist() == expected


def test_neighbouring_seeds_have_nothing_in_common():
    """A correlation of independent numbers has the standard deviation 1 / sqrt(NUM); the largest of 2 * 595 lies below
    5.5 of them but once in ten thousand."""
    numbers = uniform(torch.arange(NUM + 1), 35)
    columns = torch.corrcoef(torch.cat([numbers[:-1], numbers[1:, :1]], 1).T)
    assert (columns - torch.eye(36)).abs().max() < 5.5 / math.sqrt(NUM)


def distance(ours, theirs):
    """Of Kolmogorov and Smirnov."""
    ours, theirs = ours.double().sort().values, theirs.double().sort().values
    both = torch.cat([ours, theirs])
    return (torch.searchsorted(ours, both, right=True) / len(ours)
            - torch.searchsorted(theirs, both, right=True) / len(theirs)).abs().max().item()


@pytest.fixture(scope="module")
def draws():
    return drawn(only(*PARTS, size=SIZE), torch.arange(NUM), SIDE, SIDE)


def by_kornia(generator, side):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return generator((NUM, 3, side, side))


@pytest.mark.parametrize("crop", [PARTS["crop"], Crop(1.0, [0.5, 1.0], [0.9, 1.1]), Crop(1.0, [0.9, 1.0], [2.0, 3.0])],
                         ids=["usual", "large", "none fits"])
def test_crops_are_distributed_as_kornias(crop):
    from kornia.augmentation import random_generator

    ours = drawn(only("crop", size=SIZE, crop=crop), torch.arange(NUM), SIDE, SIDE)
    # float64 as here: in float32 some crops are rounded to another pixel
    generator = random_generator.ResizedCropGenerator((SIZE, SIZE), torch.tensor(crop.scale).double(),
                                                      torch.tensor(crop.ratio).double())
    box = by_kornia(generator, SIDE)["src"]
    theirs = {"left": box[:, 0, 0], "top": box[:, 0, 1], "width": box[:, 1, 0] - box[:, 0, 0] + 1,
              "height": box[:, 2, 1] - box[:, 0, 1] + 1}
    found = {name: distance(getattr(ours, name), theirs[name]) for name in theirs}
    assert max(found.values()) < APART, found
    assert distance(ours.width * ours.height, theirs["width"] * theirs["height"]) < APART
    assert distance(ours.width / ours.height, theirs["width"] / theirs["height"]) < APART


def test_affines_are_distributed_as_kornias(draws):
    from kornia.augmentation import random_generator

    affine = PARTS["affine"]
    theirs = by_kornia(random_generator.AffineGenerator(affine.degrees, (affine.translate, affine.translate),
                                                        tuple(affine.scale), affine.shear), SIZE)
    pairs = {"angle": theirs["angle"], "right": theirs["translations"][:, 0], "down": theirs["translations"][:, 1],
             "scale": theirs["scale"][:, 0], "shear": theirs["shear_x"]}
    found = {name: distance(getattr(draws, name), other) for name, other in pairs.items()}
    assert max(found.values()) < APART, found


def test_colors_are_distributed_as_kornias(draws):
    from kornia.augmentation import random_generator

    color = PARTS["color"]
    theirs = by_kornia(random_generator.ColorJitterGenerator(color.brightness, color.contrast, color.saturation,
                                                             color.hue), SIZE)
    found = {name: distance(getattr(draws, name), theirs[f"{name}_factor"])
             for name in ("brightness", "contrast", "saturation", "hue")}
    assert max(found.values()) < APART, found


def test_each_part_happens_as_often_as_it_should():
    """A share of NUM has a standard deviation of at most 1 / (2 sqrt(NUM)); five of them once in two million."""
    ours = drawn(recipe(size=SIZE, crop=Crop(0.3, [0.08, 0.5], [0.75, 1.333333])), torch.arange(NUM), SIDE, SIDE)
    shares = {"crop": (ours.width * ours.height < SIDE**2, 0.3), "flip": (ours.flip, 0.5),
              "affine": (ours.angle != 0, 0.5), "color": (ours.hue != 0, 0.8)}
    for name, (happened, wanted) in shares.items():
        assert abs(happened.double().mean() - wanted) < 5 / (2 * math.sqrt(NUM)), name
    together = torch.corrcoef(torch.stack([happened.double() for happened, _ in shares.values()]))
    assert (together - torch.eye(4)).abs().max() < 5 / math.sqrt(NUM), "one says nothing of another"
    warped = ours.angle != 0
    assert all(((getattr(ours, name) != neutral) == warped).all()
               for name, neutral in (("right", 0), ("down", 0), ("scale", 1), ("shear", 0)))


def test_what_never_happens_is_neutral():
    ours = drawn(only(), torch.arange(NUM), SIDE, SIDE)
    neutral = {"left": 0, "top": 0, "width": SIDE, "height": SIDE, "flip": 0, "angle": 0, "right": 0, "down": 0,
               "scale": 1, "shear": 0, "brightness": 1, "contrast": 1, "saturation": 1, "hue": 0}
    assert all((getattr(ours, field.name) == neutral[field.name]).all() for field in dataclasses.fields(ours))


@pytest.mark.parametrize("path", ["fused", "kornia"])
@pytest.mark.parametrize("kind", ["gpu", "cpu"])
def test_a_picture_is_changed_alike_in_any_batch(path, kind):
    """Draws to the bit. Pixels within a rounding of the largest normalised value, 3: sums may be ordered otherwise."""
    from augment.recipes import KINDS

    option = recipe(path=path, kind=KINDS[kind])
    pictures, seeds = noise(9, 20), torch.arange(9) * 31 - 4
    whole, order = seen(option, pictures, seeds), torch.randperm(9, generator=torch.Generator().manual_seed(3))
    shuffled = seen(option, pictures[order], seeds[order])
    parts = torch.cat([seen(option, pictures[at], seeds[at]) for at in (slice(0, 1), slice(1, 7), slice(7, 9))])
    step = 1 / 255 / 0.5 if kind == "cpu" else 0        # where a rounding decides, a whole step of uint8
    assert (shuffled - whole[order]).abs().max() <= 1e-6 + step and (parts - whole).abs().max() <= 1e-6 + step
    assert (seen(option, pictures, seeds + 1) - whole).abs().amax((1, 2, 3)).min() > 0.1

    all_, some = drawn(option, seeds, 20, 20), drawn(option, seeds[order], 20, 20)
    assert all(torch.equal(getattr(all_, field.name)[order], getattr(some, field.name))
               for field in dataclasses.fields(all_))
