"""Pictures that break loaders, made anew: name -> bytes."""

import io
import struct
import zlib

import numpy as np
from PIL import Image

RED, GREEN, BLUE, YELLOW = (220, 20, 20), (20, 200, 20), (20, 20, 220), (230, 220, 20)
TURNS = {1: None, 2: Image.Transpose.FLIP_LEFT_RIGHT, 3: Image.Transpose.ROTATE_180,
         4: Image.Transpose.FLIP_TOP_BOTTOM, 5: Image.Transpose.TRANSPOSE, 6: Image.Transpose.ROTATE_90,
         7: Image.Transpose.TRANSVERSE, 8: Image.Transpose.ROTATE_270}       # how an upright picture is stored


def quarters(width=48, height=32):
    """Red, green / blue, yellow."""
    pixels = np.empty((height, width, 3), np.uint8)
    pixels[:height // 2, :width // 2], pixels[:height // 2, width // 2:] = RED, GREEN
    pixels[height // 2:, :width // 2], pixels[height // 2:, width // 2:] = BLUE, YELLOW
    return Image.fromarray(pixels)


def saved(image, kind="JPEG", **settings):
    file = io.BytesIO()
    if kind == "JPEG":
        settings = {"quality": 95, "subsampling": 0} | settings
    image.save(file, kind, **settings)
    return file.getvalue()


def turned(orientation, kind="JPEG", tag=None, **settings):
    turn = TURNS[orientation]
    exif = Image.Exif()
    exif[0x0112] = orientation if tag is None else tag
    return saved(quarters() if turn is None else quarters().transpose(turn), kind, exif=exif, **settings)


def chunk(name, data):
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def png(width, height, depth, colour, rows, *before):
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0))
    packed = zlib.compress(b"".join(b"\0" + row for row in rows), 9)
    return b"\x89PNG\r\n\x1a\n" + head + b"".join(before) + chunk(b"IDAT", packed) + chunk(b"IEND", b"")


def noise(width, height, seed=0):
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8))


def with_sides(jpeg, width, height):
    at = jpeg.index(b"\xff\xc0") + 5
    return jpeg[:at] + struct.pack(">HH", height, width) + jpeg[at + 4:]


def wide(image):
    """Big-endian 16-bit rows of a PNG; the low byte says something else than the high one."""
    return [b"".join(bytes((int(value), 0x3C)) for value in row.flatten()) for row in np.asarray(image)]


def with_alpha(image, box):
    image = image.convert(image.mode + "A")
    image.paste((*image.getpixel(box[:2])[:-1], 0), box)
    return image


def pictures():
    jpeg, large = saved(quarters()), saved(noise(96, 96))
    plain = saved(quarters(), "PNG")
    grey = Image.fromarray(np.linspace(43, 200, 48 * 32).reshape(32, 48).astype(np.uint8))
    palette = quarters().convert("P", palette=Image.Palette.ADAPTIVE, colors=4)
    frames = [Image.new("RGB", (24, 24), colour) for colour in (RED, GREEN, BLUE)]
    several = {"save_all": True, "append_images": frames[1:]}
    found = {f"exif_{each}.jpg": turned(each) for each in TURNS}
    found |= {
        "exif_99.jpg": turned(1, tag=99), "exif_6.png": turned(6, "PNG"), "exif_6.webp": turned(6, "WEBP"),
        "exif_garbage.jpg": jpeg[:2] + b"\xff\xe1\x00\x14Exif\0\0garbage!!!!!" + jpeg[2:],
        "cmyk_adobe.jpg": saved(quarters().convert("CMYK")), "gray.jpg": saved(grey),
        "progressive.jpg": saved(quarters(), progressive=True), "sub_422.jpg": saved(quarters(), subsampling=1),
        "sub_420.jpg": saved(quarters(), subsampling=2), "odd_13x7_420.jpg": saved(quarters(13, 7), subsampling=2),
        "trunc_half.jpg": large[:len(large) // 2], "trunc_half_ended.jpg": large[:len(large) // 2] + b"\xff\xd9",
        "trunc_no_eoi.jpg": jpeg[:-2], "garbage_tail.jpg": jpeg + b"garbage!" * 40,
        "corrupt_scan.jpg": large[:len(large) // 2] + bytes(range(200, 240)) + large[len(large) // 2 + 40:],
        "stray_mark.jpg": large[:len(large) // 2] + b"\xff\xc0" + large[len(large) // 2 + 2:],
        "lying_65500.jpg": with_sides(jpeg, 65500, 65500), "zero_height.jpg": with_sides(jpeg, 48, 0),
        "px_1x1.jpg": saved(quarters(1, 1)), "px_400x1.jpg": saved(quarters(400, 1)),
        "px_2x2.jpg": saved(quarters(2, 2)),
        "px_1x1.png": saved(quarters(1, 1), "PNG"), "aspect_1000_to_1.png": saved(quarters(3000, 3), "PNG"),
        "rgb16.png": png(48, 32, 16, 2, wide(quarters())), "gray16.png": png(48, 32, 16, 0, wide(grey)),
        "palette.png": saved(palette, "PNG"),
        "palette_trns.png": saved(palette, "PNG", transparency=palette.getpixel((40, 4))),
        "rgba.png": saved(with_alpha(quarters(), (24, 0, 48, 16)), "PNG"),
        "la.png": saved(with_alpha(grey, (24, 0, 48, 16)), "PNG"),
        "gama_private.png": plain[:33] + chunk(b"gAMA", struct.pack(">I", 45455)) + chunk(b"prVt", b"?") + plain[33:],
        "bad_crc.png": plain[:-16] + bytes([plain[-16] ^ 1]) + plain[-15:],
        "trunc.png": saved(noise(96, 96), "PNG")[:3000],
        "bomb_1bit_20000.png": png(20000, 20000, 1, 0, [b"\0" * 2500] * 20000),
        "animated.gif": saved(frames[0], "GIF", **several),
        "animated.webp": saved(frames[0], "WEBP", lossless=True, **several),
        "animated.png": saved(frames[0], "PNG", **several), "multi.tiff": saved(frames[0], "TIFF", **several),
        "float.tiff": saved(Image.fromarray(np.linspace(-1, 2, 576, dtype=np.float32).reshape(24, 24)), "TIFF"),
        "icc_broken.png": saved(quarters(), "PNG", icc_profile=b"\x01\x02\x03\x04"),
        "svg.png": b'<svg xmlns="http://www.w3.org/2000/svg"></svg>', "empty.jpg": b"",
        "constant_128.png": saved(Image.new("RGB", (32, 32), (128, 128, 128)), "PNG"),
        "black.png": saved(Image.new("RGB", (32, 32)), "PNG"),
        "text_bomb.png": plain[:33] + chunk(b"zTXt", b"a\0\0" + zlib.compress(b"0" * (4 << 20))) + plain[33:],
        "bmp_top_down.bmp": saved(quarters(), "BMP")}
    return found
