"""Shards that break readers, made anew: path -> bytes. What each is stands beside it."""

import gzip
import io
import pickle
import tarfile

import numpy as np
from nasty_pictures import quarters, saved
from tars import tar_bytes, with_byte

JPEG = saved(quarters())
TEXT = b"a picture with four quarters: red and green above"
BLOCK = 512


def pairs_of(keys, text="txt", picture="jpg"):
    members = {}
    for key in keys:
        members[f"{key}.{picture}"] = JPEG + str(key).encode("utf-8", "surrogateescape")     # no two alike
        members[f"{key}.{text}"] = TEXT
    return members


def numbered(count, first=0):
    return pairs_of(f"{number:06}" for number in range(first, first + count))


def members_of(data):
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        return {info.name: info for info in tar}


def with_links():
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as tar:
        def add(name, data=b"", kind=tarfile.REGTYPE, target=""):
            info = tarfile.TarInfo(name)
            info.size, info.type, info.linkname = len(data), kind, target
            tar.addfile(info, io.BytesIO(data))

        add("000000.jpg", JPEG)
        add("000000.txt", TEXT)
        add("000001.jpg", kind=tarfile.LNKTYPE, target="000000.jpg")
        add("000001.txt", TEXT)
        add("000002.jpg", kind=tarfile.SYMTYPE, target="/etc/hostname")
        add("000002.txt", TEXT)
        add("fifo.jpg", kind=tarfile.FIFOTYPE)
        add("dev.jpg", kind=tarfile.CHRTYPE)
        add("000003.jpg", JPEG + b"3")
        add("000003.txt", TEXT)
    return file.getvalue()


def huge_size(data, name):
    """The header of a member claims 64 GiB."""
    at = members_of(data)[name].offset
    header = bytearray(data[at:at + BLOCK])
    header[124:136] = b"\x80" + (64 << 30).to_bytes(11, "big")
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    return data[:at] + bytes(header) + data[at + BLOCK:]


def npy(array):
    file = io.BytesIO()
    np.save(file, array, allow_pickle=True)
    return file.getvalue()


class Payload:
    def __reduce__(self):
        return print, ("UNPICKLED: the loader ran code from the data",)


def shards():
    good = tar_bytes(numbered(8))
    parts = members_of(good)
    four = tar_bytes(numbered(4))
    last = members_of(four)["000003.txt"]
    code, trap = pickle.dumps(Payload()), tar_bytes(pairs_of(["first", "shared"]))
    found = {
        "good.tar": good,
        "trunc_mid_data.tar": good[:parts["000007.jpg"].offset_data + 386],
        "trunc_between_parts.tar": good[:parts["000007.txt"].offset],
        "trunc_in_header.tar": good[:parts["000004.jpg"].offset + 200],
        "bad_header_mid.tar": with_byte(good, parts["000004.jpg"].offset + 3, 0x7A),
        "no_eof_blocks.tar": four[:last.offset_data + BLOCK],
        "bitflip_in_jpeg.tar": with_byte(good, parts["000002.jpg"].offset_data + 300, 0x55),
        "zero_bytes.tar": b"", "empty_valid.tar": tar_bytes({}),
        "html_error_page.tar": b"<html><body><h1>503 Service Unavailable</h1></body></html>" * 20,
        "gzip_named_tar.tar": gzip.compress(good), "trailing_garbage.tar": good + b"garbage!" * 128,
        "concatenated.tar": good + tar_bytes(numbered(8, 8)),
        "huge_size_header.tar": huge_size(tar_bytes(numbered(2))[:10240], "000001.jpg"),
        "many_tiny.tar": tar_bytes({f"{number:05}.txt": str(number).encode() for number in range(1200)}),
        "one_sample.tar": tar_bytes(numbered(1)),
        "dup_keys/a.tar": tar_bytes(numbered(3)), "dup_keys/b.tar": tar_bytes(numbered(3)),
        "merge_trap/a.tar": trap[:members_of(trap)["shared.txt"].offset],
        "merge_trap/b.tar": tar_bytes(pairs_of(["shared", "third"])),
        "names/dots_in_key.tar": tar_bytes(pairs_of(["img.v1.2", "2024-01-01T10:00:00.123", "track 2.0 (clean)"])),
        "names/double_ext.tar": tar_bytes({f"00{n}.{field}": JPEG if field != "txt" else TEXT for n in range(3)
                                           for field in ("left.jpg", "right.jpg", "seg.png", "txt")}),
        "names/non_ascii.tar": tar_bytes(pairs_of(["\u65e5\u672c\u8a9e", "na\u00efve", "caf\u00e9", "cafe\u0301",
                                                   "emoji_\U0001f642", "\u043f\u0440/\u043a\u0430\u0434\u0440"])),
        "names/latin1_bytes.tar": tar_bytes(pairs_of([b"caf\xe9".decode("utf-8", "surrogateescape")]),
                                            tarfile.GNU_FORMAT),
        "names/long_gnu.tar": tar_bytes(pairs_of(["d" * 302]), tarfile.GNU_FORMAT),
        "names/long_pax.tar": tar_bytes(pairs_of(["d" * 302])),
        "names/macos_junk.tar": tar_bytes({"._000000.jpg": b"Mac OS X", ".DS_Store": b"Bud1", **numbered(1),
                                           "__MACOSX/._000000.txt": b"Mac!", "Thumbs.db": b"\xd0\xcf\x11\xe0",
                                           **numbered(1, 1)}),
        "names/wds_meta.tar": tar_bytes({"__meta__/info.json": b"{}", "__classes__": b"2", **numbered(2)}),
        "names/upper_ext.tar": tar_bytes({"000.JPG": JPEG, "000.TXT": TEXT, "001.Jpeg": JPEG, "001.txt": TEXT,
                                          "002.jpe": JPEG, "002.caption": TEXT}),
        "names/no_ext.tar": tar_bytes({"README": b"hello", ".hidden": b"x", **numbered(1)}),
        "names/links_and_devices.tar": with_links(),
        "names/path_traversal.tar": tar_bytes(pairs_of(["../../evil", "/abs/evil"])),
        "names/all_incomplete.tar": tar_bytes({f"{number}.jpg": JPEG for number in range(3)}),
        "names/not_grouped.tar": tar_bytes(dict(sorted(numbered(8).items(), key=lambda item: item[0][-3:]))),
        "names/dup_member.tar": tar_bytes(numbered(1))[:-8704] + tar_bytes(numbered(2)),
        "fields/zero_length.tar": tar_bytes({"0.jpg": b"", "0.txt": TEXT, "1.jpg": JPEG, "1.txt": b"", "2.jpg": JPEG,
                                             "2.txt": b" \n\t\r\n", "3.jpg": JPEG, "3.txt": TEXT}),
        "fields/odd_text.tar": tar_bytes({
            f"{number}.{field}": JPEG if field == "jpg" else text for number, text in enumerate([
                b"\xff\xfe\xfa broken utf-8 \xc3", b"\xef\xbb\xbfUTF-8 with BOM", "UTF-16 text".encode("utf-16"),
                b"nul\0inside", b"long " * 12000, b"<image> what <|image|> is this <|im_end|>",
                "e\u0301 a\u200bzero width \u202eRTL".encode(), "\U0001f468\u200d\U0001f469 family".encode(),
                b"a\r\nb\r\nc"]) for field in ("jpg", "txt")}),
        "fields/labels_cls.tar": tar_bytes({
            f"{number}.{field}": JPEG if field == "jpg" else label for number, label in enumerate([
                b"3", b"3\n", b" 7 ", b"-1", b"1.0", b"abc", b"", "\u0663".encode(), b"9" * 20])
            for field in ("jpg", "cls")}),
        "fields/pickles.tar": tar_bytes({"0.pyd": code, "0.txt": b"x", "1.pickle": code, "1.txt": b"x",
                                         "2.npy": npy(np.array([Payload()], object)), "2.txt": b"x",
                                         "3.npy": npy(np.asfortranarray(np.arange(6, dtype=">i4").reshape(2, 3))),
                                         "3.txt": b"x"})}
    for number, count in enumerate((1, 7, 0, 13, 3)):
        found[f"uneven/shard-{number:06}.tar"] = tar_bytes(numbered(count, 100 * number))
    return found
