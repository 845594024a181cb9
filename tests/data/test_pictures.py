"""Every nasty picture comes out as its line says, or is refused with a reason, the same on both paths."""

import os
import resource
import warnings
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from nasty_pictures import BLUE, GREEN, RED, TURNS, YELLOW, noise, pictures, png, quarters, saved, turned
from PIL import Image, ImageFile

from forge.data import pictures as module
from forge.data.headers import BadPicture, header_of
from forge.data.pictures import Policy, decode, upright

GIVEN = Path(os.environ.get("FORGE_NASTY", Path(__file__).parents[3] / "shared" / "nasty")) / "images"
PICTURES = cache(pictures)
POLICY = Policy("apply", "white", 89_000_000)
UPRIGHT = [*(f"exif_{each}.jpg" for each in TURNS), "exif_99.jpg", "exif_garbage.jpg", "exif_6.png", "exif_6.webp",
           "cmyk_adobe.jpg", "progressive.jpg", "sub_422.jpg", "sub_420.jpg", "trunc_no_eoi.jpg", "garbage_tail.jpg",
           "rgb16.png", "palette.png", "gama_private.png", "icc_broken.png", "bmp_top_down.bmp"]
SIDES = {"odd_13x7_420.jpg": (7, 13), "gray.jpg": (32, 48), "px_1x1.jpg": (1, 1), "px_400x1.jpg": (1, 400),
         "px_2x2.jpg": (2, 2), "px_1x1.png": (1, 1), "aspect_1000_to_1.png": (3, 3000), "la.png": (32, 48),
         "constant_128.png": (32, 32), "black.png": (32, 32), "gray16.png": (32, 48), "rgba.png": (32, 48),
         "palette_trns.png": (32, 48)}
FIRST_FRAME = ["animated.gif", "animated.webp", "animated.png", "multi.tiff"]
REFUSED = {"trunc_half.jpg": "damaged picture", "trunc_half_ended.jpg": "damaged picture",
           "stray_mark.jpg": "damaged picture", "lying_65500.jpg": "too many pixels",
           "zero_height.jpg": "picture without sides", "bad_crc.png": "damaged picture", "trunc.png": "damaged picture",
           "bomb_1bit_20000.png": "too many pixels", "float.tiff": "picture of unknown range",
           "svg.png": "not a picture", "empty.jpg": "empty picture", "text_bomb.png": "damaged picture"}
BY_EITHER = {"corrupt_scan.jpg"}        # what libjpeg makes of it, or nothing


@pytest.fixture(params=["simplejpeg", "pillow"])
def path(request, monkeypatch):
    """Both ways of decoding a JPEG."""
    if request.param == "simplejpeg":
        pytest.importorskip("simplejpeg")
    else:
        found = module._package
        monkeypatch.setattr(module, "_package", lambda name: None if name == "simplejpeg" else found(name))
    return request.param


@pytest.fixture(params=["made", "given"])
def data(request):
    def read(name):
        if request.param == "made":
            return PICTURES()[name]
        if not (GIVEN / name).exists():
            pytest.skip("not among the given pictures")
        return (GIVEN / name).read_bytes()

    return read


def at_quarters(pixels):
    height, width, channels = pixels.shape
    assert channels == 3 and pixels.dtype == np.uint8 and pixels.flags.c_contiguous
    return [pixels[y * height // 4, x * width // 4].astype(int) for y in (1, 3) for x in (1, 3)]


def assert_quarters(pixels, expected=(RED, GREEN, BLUE, YELLOW), slack=12):
    """Within what JPEG at quality 95 makes of plain colours, measured to be below 6, doubled."""
    for found, colour in zip(at_quarters(pixels), expected, strict=True):
        assert np.abs(found - colour).max() <= slack, (found, colour)


def test_each_line_has_its_expectation():
    assert set(PICTURES()) == {*UPRIGHT, *SIDES, *FIRST_FRAME, *REFUSED, *BY_EITHER}
    if GIVEN.exists():
        assert {each.name for each in GIVEN.iterdir()} <= set(PICTURES())


@pytest.mark.parametrize("name", UPRIGHT)
def test_pictures_come_out_upright_and_in_their_colours(name, data, path):
    pixels = decode(data(name), POLICY)
    assert pixels.shape == (32, 48, 3)
    assert_quarters(pixels)


@pytest.mark.parametrize("name", SIDES)
def test_small_grey_and_transparent_pictures_have_three_channels(name, data, path):
    pixels = decode(data(name), POLICY)
    assert pixels.shape == (*SIDES[name], 3) and pixels.dtype == np.uint8
    if "gray" in name or name in ("la.png", "constant_128.png", "black.png"):
        assert (pixels == pixels[:, :, :1]).all()


@pytest.mark.parametrize("name", FIRST_FRAME)
def test_the_first_frame_is_taken(name, data, path):
    assert_quarters(decode(data(name), POLICY), [RED] * 4, slack=0 if name != "animated.gif" else 4)


@pytest.mark.parametrize("name, reason", REFUSED.items())
def test_what_is_no_whole_picture_is_refused_with_a_reason(name, reason, data, path):
    with pytest.raises(BadPicture) as refused:
        decode(data(name), POLICY)
    assert refused.value.reason == reason


def test_paths_agree_on_a_broken_scan(data, monkeypatch, capfd):
    pytest.importorskip("simplejpeg")
    fast = _outcome(data("corrupt_scan.jpg"))
    monkeypatch.setattr(module, "_by_simplejpeg", lambda *_: None)
    assert fast == _outcome(data("corrupt_scan.jpg"))
    assert capfd.readouterr().err == ""


def _outcome(data):
    try:
        return decode(data, POLICY).tobytes()
    except BadPicture as bad:
        return str(bad)


def test_paths_agree_on_cut_and_flipped_pictures(monkeypatch):
    """What is refused does not depend on the packages that are there; nor do pixels, by more than rounding."""
    pytest.importorskip("simplejpeg")
    draw = np.random.default_rng(0)
    whole = [saved(noise(40, 24)), saved(noise(40, 24, 1), subsampling=2, progressive=True), saved(quarters())]
    broken = []
    for number in range(120):
        data = bytearray(whole[number % 3])
        if number % 2:
            data[int(draw.integers(len(data) // 3, len(data)))] ^= 1 << int(draw.integers(8))
        else:
            del data[int(draw.integers(len(data) // 2, len(data))):]
        broken.append(bytes(data))
    fast = [_outcome(data) for data in broken]
    monkeypatch.setattr(module, "_by_simplejpeg", lambda *_: None)
    slow = [_outcome(data) for data in broken]
    assert [type(each) for each in fast] == [type(each) for each in slow]
    assert {type(each) for each in fast} == {str, bytes}


def test_exif_may_be_ignored(path):
    policy = Policy("ignore", "white", 10**6)
    assert_quarters(decode(turned(3), policy), (YELLOW, BLUE, GREEN, RED))
    assert decode(turned(6), policy).shape == decode(turned(6, "PNG"), policy).shape == (48, 32, 3)


@pytest.mark.parametrize("compression", [None, "tiff_lzw"])
@pytest.mark.parametrize("orientation", TURNS)
def test_exif_of_tiff_holds_too_which_pillow_turns_by_itself(orientation, compression):
    """With a compression, libtiff reads it."""
    data = turned(orientation, "TIFF", compression=compression)
    header = header_of(data)
    assert header.orientation == orientation
    for exif, turn in (("apply", None), ("ignore", TURNS[orientation])):
        policy = Policy(exif, "white", 10**6)
        pixels, wanted = decode(data, policy), quarters() if turn is None else quarters().transpose(turn)
        assert (pixels == np.asarray(wanted)).all()
        assert upright(header, policy) == (pixels.shape[1], pixels.shape[0])


def test_an_orientation_that_does_not_exist_turns_no_tiff():
    for exif in ("apply", "ignore"):
        pixels = decode(turned(1, "TIFF", tag=99), Policy(exif, "white", 10**6))
        assert (pixels == np.asarray(quarters())).all()


@pytest.mark.parametrize("alpha, through", [("white", (255,) * 3), ("black", (0,) * 3), ("drop", GREEN)])
@pytest.mark.parametrize("name", ["rgba.png", "palette_trns.png"])
def test_one_setting_says_what_shows_through(name, alpha, through):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pixels = decode(PICTURES()[name], Policy("apply", alpha, 10**6))
    assert_quarters(pixels, (RED, through, BLUE, YELLOW))


def test_half_transparency_is_blended():
    half = np.array([[[200, 100, 0, 128]]], np.uint8)
    pixels = decode(saved(Image.fromarray(half), "PNG"), POLICY)
    assert pixels.tolist() == [[[round((each * 128 + 255 * 127) / 255) for each in (200, 100, 0)]]]


def test_sixteen_bits_keep_the_upper_eight():
    rows = [b"".join(value.to_bytes(2, "big") for value in (0, 255, 256, 0x7FFF, 0xFF00, 0xFFFF))]
    assert decode(png(6, 1, 16, 0, rows), POLICY)[0, :, 0].tolist() == [0, 0, 1, 127, 255, 255]
    rgb = png(2, 1, 16, 2, [b"".join(value.to_bytes(2, "big") for value in (0, 256, 0x7FFF, 0xFF00, 0xFFFF, 255))])
    assert decode(rgb, POLICY).tolist() == [[[0, 1, 127], [255, 255, 0]]]


def test_settings_that_others_made_in_pillow_change_nothing(monkeypatch):
    monkeypatch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", True)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 5)
    with pytest.raises(BadPicture):
        decode(PICTURES()["trunc.png"], POLICY)
    assert_quarters(decode(PICTURES()["palette.png"], POLICY))
    assert ImageFile.LOAD_TRUNCATED_IMAGES and Image.MAX_IMAGE_PIXELS == 5


def test_bombs_are_refused_before_anything_is_allocated(path):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for name in ("lying_65500.jpg", "bomb_1bit_20000.png"):
        with pytest.raises(BadPicture, match="too many pixels"):
            decode(PICTURES()[name], POLICY)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 20_000        # kB; decoded they take 400 MB


@pytest.mark.parametrize("name", sorted({*UPRIGHT, *SIDES, *FIRST_FRAME}))
def test_the_header_says_the_sides_that_are_decoded(name):
    header = header_of(PICTURES()[name])
    stored = decode(PICTURES()[name], Policy("ignore", "drop", 10**9))
    assert (header.height, header.width) == stored.shape[:2]


@pytest.mark.parametrize("lossless", [True, False])
def test_plain_webp_has_its_header_read(lossless):
    data = saved(quarters(), "WEBP", lossless=lossless, quality=95)
    assert header_of(data).width == 48 and header_of(data).height == 32
    assert decode(data, POLICY).shape == (32, 48, 3)


def test_no_cut_or_flipped_header_raises_anything_else():
    draw = np.random.default_rng(1)
    for name in ("exif_6.jpg", "exif_6.png", "exif_6.webp", "multi.tiff", "animated.gif", "bmp_top_down.bmp"):
        whole = PICTURES()[name]
        for _ in range(150):
            data = bytearray(whole[:int(draw.integers(len(whole)))])
            for at in draw.integers(0, max(1, len(data)), 3):
                if len(data):
                    data[int(at)] = int(draw.integers(256))
            try:
                header = header_of(bytes(data))
            except BadPicture:
                continue
            assert header.width > 0 and header.height > 0 and 1 <= header.orientation <= 8


def two_headers():
    """A PNG whose second header Pillow believes."""
    small, large = (saved(Image.new("L", (side, side)), "PNG") for side in (4, 300))
    return small[:33] + large[8:]


def frame_beyond_its_screen():
    data = bytearray(saved(Image.new("P", (300, 300)), "GIF"))
    data[6:10] = (4).to_bytes(2, "little") * 2
    return bytes(data)


@pytest.mark.parametrize("make", [two_headers, frame_beyond_its_screen])
def test_a_second_size_is_not_believed(make):
    """What the header claims is what may be allocated."""
    data = make()
    header = header_of(data)
    assert header.width == header.height == 4
    for max_pixels in (100, 89_000_000):
        with pytest.raises(BadPicture):
            decode(data, Policy("apply", "white", max_pixels))
