"""Pictures as squares: how many, which part each shows, and what a JPEG loses by being shrunk as it is decoded."""

import sys

import numpy as np
import pytest
from nasty_pictures import BLUE, GREEN, RED, YELLOW, noise, quarters, saved, turned
from PIL import Image

from forge.data import pictures
from forge.data.headers import BadPicture, header_of
from forge.data.pictures import Policy, decode
from forge.data.squares import Squares

POLICY = Policy("apply", "white", 1_500_000)
FITS = ("squash", "crop", "pad")


@pytest.fixture(params=["simplejpeg", "pillow"])
def path(request, monkeypatch):
    if request.param == "pillow":
        monkeypatch.setattr(pictures, "_by_simplejpeg", lambda *_: None)
    else:
        pytest.importorskip("simplejpeg")
    return request.param


@pytest.mark.parametrize(("sides", "most", "grid"), [
    ((8, 8), 4, (1, 1)), ((1, 1), 4, (1, 1)), ((9, 8), 1, (1, 1)),          # no larger than a square; no tiles wanted
    ((16, 16), 4, (2, 2)), ((16, 16), 3, (1, 1)), ((100, 100), 9, (3, 3)),
    ((17, 8), 4, (2, 1)), ((8, 17), 4, (1, 2)), ((24, 16), 6, (3, 2)), ((160, 80), 6, (2, 1)), ((160, 80), 8, (4, 2)),
    ((3000, 3), 4, (4, 1)), ((3, 3000), 4, (1, 4)), ((3000, 1), 9, (9, 1)), ((20, 1), 9, (3, 1))])
def test_the_grid_is_nearest_to_the_shape_and_bounded(sides, most, grid):
    squares = Squares(8, most, "squash")
    assert squares.grid(*sides) == grid
    assert squares.count(*sides) == (1 if grid == (1, 1) else grid[0] * grid[1] + 1)


def test_a_turned_picture_has_as_many_squares():
    for most in (1, 2, 5, 6, 12):
        squares = Squares(8, most, "squash")
        for width in range(1, 60, 3):
            for height in range(1, 60, 2):
                count = squares.count(width, height)
                assert count == squares.count(height, width) and count <= most + (most > 1)


@pytest.mark.parametrize("fit", FITS)
@pytest.mark.parametrize("sides", [(1, 1), (1, 40), (40, 1), (3000, 3), (3, 3000), (8, 8), (7, 9), (33, 20)])
@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
def test_odd_shapes_become_squares(fit, sides, kind, path):
    squares = Squares(8, 4, fit)
    cut = squares.cut(saved(noise(*sides), kind), POLICY)
    assert cut.shape == (squares.count(*sides), 8, 8, 3) and cut.dtype == np.uint8


def colours(square):
    """Of the middles of its quarters, each as the nearest of the four."""
    named = {"r": RED, "g": GREEN, "b": BLUE, "y": YELLOW}
    quarter, last = len(square) // 4, len(square) - len(square) // 4 - 1
    return "".join(min(named, key=lambda name: abs(square[y, x].astype(int) - named[name]).sum())
                   for y in (quarter, last) for x in (quarter, last))


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("max_tiles", [1, 6])
def test_squares_are_upright_in_reading_order_and_all_of_it_comes_last(orientation, max_tiles, path):
    """48 x 32 in four colours, in squares of 16: a grid of 3 x 2, whatever way round it is stored."""
    *tiles, whole = Squares(16, max_tiles, "squash").cut(turned(orientation), POLICY)
    assert colours(whole) == "rgby"
    assert [colours(tile) for tile in tiles] == ([] if max_tiles == 1 else
                                                 ["rrrr", "rgrg", "gggg", "bbbb", "byby", "yyyy"])


def near(pixel, colour):
    return abs(pixel.astype(int) - colour).max() < 20       # bicubic filters overshoot beside an edge


def test_what_each_fit_shows():
    data = saved(quarters(48, 16), "PNG")
    crop, pad = (Squares(16, 1, fit).cut(data, POLICY)[0] for fit in ("crop", "pad"))
    assert crop[2, 2].tolist() == list(RED) and crop[13, 13].tolist() == list(YELLOW)
    edge = np.asarray(quarters(48, 16))[:, 16:32]
    assert np.array_equal(crop, edge)                           # the middle third, pixel by pixel
    assert (pad[:5] == 128).all() and (pad[10:] == 128).all() and near(pad[5, 1], RED)
    tall = Squares(16, 1, "pad").cut(saved(quarters(16, 48), "PNG"), POLICY)[0]
    assert (tall[:, :5] == 128).all() and (tall[:, 10:] == 128).all() and near(tall[1, 5], RED)


@pytest.mark.parametrize("fit", FITS)
def test_a_line_of_pixels_takes_no_memory(fit):
    """Cropped before it is resized: else it would be 60,000 squares wide meanwhile, 47 GB."""
    assert Squares(512, 1, fit).cut(saved(noise(60_000, 1), "PNG"), POLICY).shape == (1, 512, 512, 3)


def smooth(width, height):
    y, x = np.mgrid[:height, :width] / np.array([height, width]).reshape(2, 1, 1)
    waves = np.stack([np.sin(7 * x + 3 * y), np.cos(5 * y - 2 * x), np.sin(4 * x * y)], -1)
    return Image.fromarray((127.5 + 100 * waves).astype(np.uint8))


@pytest.mark.parametrize("sides", [(640, 480), (101, 77), (1001, 333), (63, 65)])
@pytest.mark.parametrize("least", [(1, 1), (8, 8), (100, 40), (320, 240), (321, 1), (5000, 5000)])
def test_a_jpeg_is_shrunk_as_far_as_is_enough_and_alike_on_both_paths(sides, least, monkeypatch):
    pytest.importorskip("simplejpeg")
    data = saved(noise(*sides))
    fast = decode(data, POLICY, least)
    by = next(by for by in (8, 4, 2, 1) if by == 1 or all(-(-side // by) >= enough
                                                          for side, enough in zip(sides, least, strict=True)))
    assert fast.shape == (-(-sides[1] // by), -(-sides[0] // by), 3)
    monkeypatch.setattr(pictures, "_by_simplejpeg", lambda *_: None)
    assert np.array_equal(decode(data, POLICY, least), fast)


@pytest.mark.parametrize("orientation", [1, 6])
def test_the_sides_that_are_enough_are_those_of_the_upright_picture(orientation, path):
    data = turned(orientation)      # 48 x 32 once it is upright
    assert decode(data, POLICY, (24, 10)).shape == (16, 24, 3) and decode(data, POLICY, (25, 10)).shape == (32, 48, 3)


def test_shrinking_changes_a_smooth_picture_by_a_level_or_two():
    """Either way is an average of the same pixels by weights that differ, of a picture that is nearly linear over them;
    quantisation adds a level."""
    data = saved(smooth(1200, 900), quality=98)
    shrunk = Squares(96, 1, "squash").cut(data, POLICY)[0].astype(int)
    plain = np.asarray(Image.fromarray(decode(data, POLICY)).resize((96, 96), Image.Resampling.BICUBIC)).astype(int)
    assert abs(shrunk - plain).mean() < 1 and abs(shrunk - plain).max() <= 4


def test_thin_lines_are_averaged_and_not_left_out():
    lines = np.zeros((256, 256, 3), np.uint8)
    lines[::2] = 255
    square = Squares(32, 1, "squash").cut(saved(Image.fromarray(lines), "PNG"), POLICY)[0]
    assert abs(square.astype(int) - 127).max() <= 8     # a line more or less of the 32 that the filter weighs: 255 / 32


def test_bad_pictures_are_refused_as_ever(path):
    data = saved(noise(64, 64))
    for bad in (data[:len(data) // 2], b"", b"text", saved(noise(2000, 1000), "PNG")):
        with pytest.raises(BadPicture):
            Squares(8, 4, "squash").cut(bad, POLICY)
    assert header_of(data).kind == "jpeg"


def test_without_pillow_it_is_a_sentence(monkeypatch):
    from forge.errors import UnusableEnvironment

    data = saved(noise(9, 9))
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    pictures._package.cache_clear()
    try:
        with pytest.raises(UnusableEnvironment, match="needs the package pillow"):
            Squares(8, 1, "squash").cut(data, POLICY)
    finally:
        pictures._package.cache_clear()
