"""The fused path against kornia's operations, and against what it promises by itself."""

import math
import random
from dataclasses import fields

import numpy as np
import pytest
import torch
from augment.recipes import KINDS, PARTS, batch, noise, only, recipe, seen, waves
from torch.nn import functional

from forge.augment.by_kornia import at_once, one_by_one
from forge.augment.draws import Draws, drawn
from forge.augment.fused import jittered, sampled

HALF = 2.0**-24             # half a rounding of float32, relative
LEAST_STD = 0.5             # of the recipes here: errors are divided by it


def both(pictures, *names, size):
    return (seen(only(*names, size=size, path=path), pictures) for path in ("fused", "kornia"))


SAMPLED_ONCE = [(names, 24) for names in ((), ("flip",), ("color",), ("affine",), ("affine", "flip"))]
SAMPLED_ONCE += [(names, side) for names in (("crop",), ("crop", "flip", "color")) for side in (9, 24)]


@pytest.mark.parametrize("names, side", SAMPLED_ONCE, ids=str)
def test_where_the_twin_samples_once_the_paths_agree(names, side):
    """A place of up to `size` pixels is computed with a dozen roundings by each, along two axes between whose pixels
    the slope is 1 at most. The colours magnify it by 1.4^3 at most, and their means by as much again."""
    size = 24
    fused, kornia = both(noise(32, side), *names, size=size)
    slopes = 2 * (2 * 1.4**3 if "color" in names else 1)
    assert (fused - kornia).abs().max() <= 2 * 12 * size * HALF * slopes / LEAST_STD < 1e-3


@pytest.mark.parametrize("side, size", [(64, 64), (48, 64), (80, 64)])
def test_one_sampling_is_near_two(side, size):
    """Linear interpolation between points h apart is off by h^2 / 8 times the second derivative, here along each of two
    axes. The twin interpolates in the source and again in the resized crop, the fused path in the source alone. The
    source is off by half a step of uint8 for both. Where the picture shrinks, filters of one variance differ by
    what is of fourth order: h^2 / 8 once more for each is more than that."""
    pictures, curved = waves(32, side, most=6.0)
    fused, kornia = both(pictures, "crop", "flip", "affine", size=size)
    samplings = 2 * (2 if side > size else 1) / side**2 + 1 / size**2
    bound = samplings * 2 * curved / 8 + 1 / 255
    assert (fused - kornia).abs().max() <= bound / LEAST_STD < 0.05
    assert fused.amax() - fused.amin() > 1, "there is something to see"


@pytest.mark.parametrize("shrinks", [1.25, 1.5, 2.0, 3.0, 4.0])
def test_shrinking_does_not_alias(shrinks):
    """On noise, the worst there is, the distance (root mean square) to torch's resize with antialias is at most a
    sixth of what is left of the noise where a picture shrinks to a half, and 0.4 beyond. Sampling without antialias is
    farther off than either, by as much as all that is left from a half on."""
    size = 48
    pictures = noise(4, round(size * shrinks))
    draws = drawn(only(size=size), torch.arange(4), *pictures.shape[1:3])
    source = pictures.permute(0, 3, 1, 2).float() / 255
    wanted, plain = (functional.interpolate(source, (size, size), mode="bilinear", antialias=antialias)
                     for antialias in (True, False))
    noise_left = wanted.std().item()
    assert off(sampled(pictures, draws, size), wanted) < noise_left * (1 / 6 if shrinks <= 2 else 0.4)
    assert off(plain, wanted) > noise_left * (0.35 if shrinks < 2 else 0.75)


@pytest.mark.parametrize("shape", [(1, 40, 24), (24, 24, 24), (3, 300, 200), (5, 7, 3)], ids=str)
def test_the_twins_crops_at_once_are_torchs_one_by_one(shape):
    """torch computes a place of up to a side in float32, with a few roundings; along each axis, between pixels of 0 to
    1, the slope is 1 at most."""
    num, height, width = shape
    pictures = torch.randint(0, 256, (num, 3, height, width), generator=torch.Generator().manual_seed(0)) / 255
    for size in (9, 24):
        draws = drawn(only("crop", size=size), torch.arange(num), height, width)
        error = at_once(pictures, draws, size) - one_by_one(pictures, draws, size)
        assert error.abs().max() <= 2 * 4 * max(height, width) * HALF


def test_the_twin_asks_its_device_for_nothing():
    """Of tensors that have shapes and no numbers: whoever asks for one fails."""
    shapes = batch(noise(8, 40)).to(torch.device("meta"))
    with pytest.raises(RuntimeError, match="meta"):
        shapes.tensors["pictures"].sum().tolist()
    assert recipe(path="kornia")(shapes).tensors["pictures"].shape == (8, 3, 16, 16)


def off(ours, wanted):
    return (ours - wanted).square().mean().sqrt().item()


def test_a_crop_sees_nothing_outside_itself():
    """White within, black without: with all of the rest off, the result is white, also where it shrinks."""
    size, side = 8, 40
    draws = drawn(only("crop", size=size), torch.arange(16), side, side)
    pictures = torch.zeros(16, side, side, 3, dtype=torch.uint8)
    for picture, left, top, width, height in zip(pictures, *(
            getattr(draws, name).int().tolist() for name in ("left", "top", "width", "height")), strict=True):
        picture[top:top + height, left:left + width] = 255
    assert (sampled(pictures, draws, size) - 1).abs().max() < 1e-5


def neutral(num, **changed):
    values = {field.name: torch.full((num,), 1.0 if field.name in ("brightness", "contrast", "saturation", "scale")
                                     else 0.0, dtype=torch.float64) for field in fields(Draws)}
    return Draws(**values | {"width": torch.full((num,), 16.0), "height": torch.full((num,), 16.0),
                             "flip": torch.zeros(num, dtype=torch.bool)} | changed)


def test_a_quarter_turn_and_a_third_of_the_wheel():
    """Known without another implementation: pixels go where they should, clockwise, and red becomes green."""
    pictures = noise(1, 16)
    turned = sampled(pictures, neutral(1, angle=torch.tensor([90.0]).double()), 16)
    wanted = torch.rot90(pictures.permute(0, 3, 1, 2).float() / 255, -1, (2, 3))
    assert (turned - wanted).abs().max() < 1e-4
    red = torch.tensor([1.0, 0.25, 0.25])[None, :, None, None]
    green = jittered(red, neutral(1, hue=torch.tensor([1 / 3]).double()))
    assert (green - red.roll(1, 1)).abs().max() < 1e-6


@pytest.mark.parametrize("path", ["fused", "kornia"])
def test_cpu_is_gpu_within_half_a_step_of_uint8(path):
    pictures = noise(9, 20)
    near = seen(recipe(path=path, kind=KINDS["cpu"]), pictures) - seen(recipe(path=path), pictures)
    assert 0 < near.abs().max() <= 0.5 / 255 / LEAST_STD + 1e-6


def test_cpu_sends_bytes():
    option = recipe(kind=KINDS["cpu"])
    read = option.read(batch(noise(9, 20))).tensors["pictures"]
    assert read.dtype is torch.uint8 and read.shape == (9, 3, 16, 16) and read.is_contiguous()


@pytest.mark.parametrize("path", ["fused", "kornia"])
@pytest.mark.parametrize("kind", ["gpu", "cpu"])
@pytest.mark.parametrize("pictures", [noise(3, 1), noise(0, 20), torch.zeros(3, 20, 20, 3, dtype=torch.uint8),
                                      torch.full((3, 20, 20, 3), 255, dtype=torch.uint8), noise(3, 200), noise(2, 2)],
                         ids=["one pixel", "none", "black", "white", "large", "tiny"])
def test_any_picture_gives_finite_numbers_of_the_shape(path, kind, pictures):
    made = seen(recipe(path=path, kind=KINDS[kind]), pictures)
    assert made.shape == (len(pictures), 3, 16, 16) and made.dtype is torch.float32
    low, high = torch.tensor([-1.0, -0.4 / 0.6, -0.3 / 0.7]), torch.tensor([1.0, 1.0, 1.0])
    assert torch.isfinite(made).all()
    assert (made >= low[:, None, None] - 1e-5).all() and (made <= high[:, None, None] + 1e-5).all()


@pytest.mark.parametrize("kind", ["gpu", "cpu"])
def test_what_has_no_pictures_is_left_alone(kind):
    option, plain = recipe(kind=KINDS[kind]), batch(noise(0, 4))
    text = type(plain)({"tokens": plain.tensors["tokens"]}, 0, 0)
    assert option(option.read(text)) is text


@pytest.mark.parametrize("path", ["fused", "kornia"])
@pytest.mark.parametrize("kind", ["gpu", "cpu"])
def test_nobodys_random_numbers_are_taken(path, kind):
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()
    first = seen(recipe(path=path, kind=KINDS[kind]), noise(5, 20))
    after = torch.get_rng_state(), random.getstate(), np.random.get_state()[1]
    assert torch.equal(before[0], after[0]) and before[1] == after[1] and (before[2] == after[2]).all()
    torch.manual_seed(1)
    assert torch.equal(first, seen(recipe(path=path, kind=KINDS[kind]), noise(5, 20)))


def test_places_are_computed_in_float32_whatever_the_model_is_in():
    """bfloat16 knows places to a pixel only: nothing may come out otherwise under autocast, or by another default."""
    pictures = noise(4, 64)
    wanted = seen(recipe(), pictures)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(seen(recipe(), pictures), wanted)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert torch.equal(seen(recipe(), pictures), wanted)
    finally:
        torch.set_default_dtype(before)


def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


@pytest.mark.parametrize("path, kind", [("fused", "gpu"), ("kornia", "gpu"), ("fused", "cpu")])
def test_memory_is_flat(path, kind):
    """A batch is 49 kB when it leaves: 150 of them kept would be 7.4 MB."""
    option, pictures = recipe(path=path, kind=KINDS[kind]), noise(16, 16)

    def turn(num):
        for number in range(num):
            seen(option, pictures, torch.arange(16) + number)

    turn(40)
    before = resident()
    turn(150)
    assert resident() - before < 4e6


def test_the_recipe_of_conf_is_that_of_these_tests():
    from conftest import composed

    from forge.config import realise

    three = "[0.5,0.5,0.5]"
    for name, kind in KINDS.items():
        made = realise(composed(f"augment={name}", "augment.size=16", f"augment.mean={three}", f"augment.std={three}",
                                "run_dir=x")).augment
        assert type(made) is kind and {part: getattr(made, part) for part in PARTS} == PARTS
        assert math.isclose(made.crop.ratio[0] * made.crop.ratio[1], 1, rel_tol=1e-6)
