"""The walk finds what tarfile and webdataset find in whole files, and names the byte in broken ones."""

import gzip
import io
import os
import random
import tarfile

import pytest
from tars import pairs, tar_bytes, with_byte, written

from forge.data.storage import opened
from forge.data.tar import BLOCK, Fault, Member, walk

GOOD = tar_bytes(pairs(4))
with tarfile.open(fileobj=io.BytesIO(GOOD)) as _tar:
    STARTS, DATA = zip(*[(info.offset, info.offset_data) for info in _tar], strict=True)       # of headers, of data
END = DATA[-1] + -(-len(pairs(4)["000003.txt"]) // BLOCK) * BLOCK               # of the last member


def walked(path):
    with opened(path) as file:
        found = list(walk(file))
    return [each for each in found if isinstance(each, Member)], [each for each in found if isinstance(each, Fault)]


NAMES = {"plain.txt": b"1", "deep/er/a.txt": b"", "n" * 99 + ".txt": b"x" * 511,
         "d" * 140 + "/" + "l" * 90 + ".txt": b"2" * 512,
         "l" * 300 + ".txt": b"3" * 513, "caf\u00e9.txt": b"4", "cafe\u0301.txt": b"5"}


@pytest.mark.parametrize("format", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_members_are_those_that_tarfile_finds(tmp_path, format):
    path = written(tmp_path / "a.tar", tar_bytes(NAMES, format))
    members, faults = walked(path)
    with tarfile.open(path) as tar:
        assert members == [Member(info.name, info.offset_data, info.size) for info in tar]
    assert [path.read_bytes()[m.offset:m.offset + m.size] for m in members] == list(NAMES.values())
    assert faults == []


def test_ustar_prefixes_and_names_that_are_not_utf8(tmp_path):
    names = {"d" * 120 + "/" + "n" * 90: b"1", b"caf\xe9.txt".decode("utf-8", "surrogateescape"): b"2"}
    members, faults = walked(written(tmp_path / "a.tar", tar_bytes(names, tarfile.USTAR_FORMAT)))
    assert [member.name for member in members] == list(names) and not faults


def test_links_and_devices_are_named_and_not_followed(tmp_path):
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as tar:
        for name, kind in (("folder", tarfile.DIRTYPE), ("link.txt", tarfile.SYMTYPE), ("hard.txt", tarfile.LNKTYPE),
                           ("pipe", tarfile.FIFOTYPE), ("device", tarfile.CHRTYPE)):
            info = tarfile.TarInfo(name)
            info.type, info.linkname, info.size = kind, "/etc/hostname", 0
            tar.addfile(info)
        info = tarfile.TarInfo("a.txt")
        info.size = 3
        tar.addfile(info, io.BytesIO(b"abc"))
    members, faults = walked(written(tmp_path / "a.tar", file.getvalue()))
    assert [member.name for member in members] == ["a.txt"] and all(fault.harmless for fault in faults)
    assert [fault.reason.partition(" is ")[2].partition(",")[0] for fault in faults] == \
        ["a symbolic link", "a hard link", "a pipe", "a device"]


def with_header(data: bytes, at: int, **changes: tuple[int, bytes]) -> bytes:
    """Fields of a header, as (place, bytes), changed, and its checksum made to fit."""
    header = bytearray(data[at:at + BLOCK])
    for place, value in changes.values():
        header[place:place + len(value)] = value
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    return data[:at] + bytes(header) + data[at + BLOCK:]


HUGE = b"\x80" + (64 << 30).to_bytes(11, "big")       # 64 GiB, as GNU writes it


@pytest.mark.parametrize("data, num_members, offset, words, harmless", [
    pytest.param(GOOD[:DATA[7] + 100], 7, STARTS[7], "and the file ends after 100", False, id="cut in data"),
    pytest.param(GOOD[:STARTS[5] + 200], 5, STARTS[5], "inside a header (200 of 512 bytes)", False, id="cut header"),
    pytest.param(GOOD[:STARTS[7]], 7, STARTS[7], "blocks that end an archive are missing", True, id="cut in a sample"),
    pytest.param(GOOD[:END - 5], 8, END - 5, "inside the padding", False, id="cut in padding"),
    pytest.param(GOOD[:END], 8, END, "blocks that end an archive are missing", True, id="no end blocks"),
    pytest.param(b"", 0, 0, "empty (0 bytes)", False, id="zero bytes"),
    pytest.param(b"<html>503" + b" " * 600, 0, 0, "not a tar file, it begins with b'<html>503", False, id="a web page"),
    pytest.param(b"short", 0, 0, "inside a header (5 of 512 bytes)", False, id="a few bytes"),
    pytest.param(gzip.compress(GOOD + os.urandom(900)), 0, 0, "gzip", False, id="gzip"),
    pytest.param(with_header(GOOD, STARTS[2], size=(124, HUGE)), 7, STARTS[2], "claims 68719476736 bytes", False,
                 id="huge size"),
    pytest.param(GOOD + b"garbage!" * 128, 8, len(GOOD), "1024 bytes follow the end", True, id="trailing garbage"),
    pytest.param(GOOD + GOOD, 16, len(GOOD), "a second archive follows", False, id="two archives"),
    pytest.param(with_header(GOOD, STARTS[3], kind=(156, b"S")), 7, STARTS[3], "sparse", False, id="sparse"),
    pytest.param(with_header(GOOD, STARTS[3], kind=(156, b"Z")), 7, STARTS[3], "type 'Z'", False, id="unknown kind"),
    pytest.param(with_byte(GOOD, STARTS[3] + 5, 0x7A), 7, STARTS[3], "checksum does not match", False, id="bad header"),
    pytest.param(with_byte(GOOD, STARTS[3] + 124, 0x7A), 7, STARTS[3], "checksum", False, id="bad size"),
    pytest.param(GOOD[:STARTS[3]] + bytes(BLOCK) + GOOD[STARTS[3] + BLOCK:], 7, STARTS[3],
                 f"members again from byte {STARTS[4]}", False, id="a header of zeros"),
])
def test_damage_is_named_with_its_byte(tmp_path, data, num_members, offset, words, harmless):
    members, faults = walked(written(tmp_path / "a.tar", data))
    assert len(members) == num_members
    assert [(fault.offset, fault.harmless) for fault in faults] == [(offset, harmless)]
    assert words in faults[0].reason


def test_an_archive_without_members_is_whole(tmp_path):
    assert walked(written(tmp_path / "a.tar", tar_bytes({}))) == ([], [])


def test_every_damage_in_a_file_is_found(tmp_path):
    data = with_byte(with_byte(GOOD, STARTS[1] + 5, 0x7A), STARTS[5] + 5, 0x7A)[:DATA[7] + 1]
    members, faults = walked(written(tmp_path / "a.tar", data))
    assert [fault.offset for fault in faults] == [STARTS[1], STARTS[5], STARTS[7]]
    assert [member.offset for member in members] == [DATA[0], DATA[2], DATA[3], DATA[4], DATA[6]]


def test_random_damage_never_leads_outside_the_file(tmp_path):
    draw, data = random.Random(0), tar_bytes(NAMES)
    for _ in range(300):
        broken = bytearray(data[:draw.randrange(len(data))] if draw.random() < 0.3 else data)
        for _ in range(draw.randrange(1, 5)):
            if broken:
                broken[draw.randrange(min(len(broken), 9000))] = draw.randrange(256)
        path = written(tmp_path / "a.tar", bytes(broken))
        members, _ = walked(path)
        assert all(BLOCK <= member.offset <= member.offset + member.size <= len(broken) for member in members)


def pax(records: bytes, name: str = "a.txt") -> bytes:
    """An archive of one member, with PAX records as they are given."""
    plain = tar_bytes({name: b"abc"}, tarfile.USTAR_FORMAT)
    extended = tar_bytes({"records": records}, tarfile.USTAR_FORMAT)[:BLOCK + -(-len(records) // BLOCK) * BLOCK]
    return with_header(extended, 0, kind=(156, b"x")) + plain


@pytest.mark.parametrize("records, words", [
    (b"13 path=b.t\n", "PAX records"), (b"99 path=b.txt\n", "PAX records"), (b"x path=b.txt\n", "PAX records"),
    (b"9 pathb\n\n", "PAX records"), (b"17 path=b\0evil.t\n"[:17] + b"", "zero byte"), (b"9 size=x\n", "is not a size"),
    (b"22 GNU.sparse.major=1\n", "sparse member")])
def test_pax_records_that_do_not_add_up_are_faults(tmp_path, records, words):
    (fault,) = walked(written(tmp_path / "a.tar", pax(records)))[1]
    assert words in fault.reason and not fault.harmless


def test_a_name_in_pax_records_is_taken(tmp_path):
    members, faults = walked(written(tmp_path / "a.tar", pax(b"14 path=b.txt\n")))
    assert [(member.name, member.size) for member in members] == [("b.txt", 3)] and not faults


def test_an_archive_inside_a_sparse_member_is_not_taken_for_its_neighbours(tmp_path):
    inner = tar_bytes({"inner.txt": b"inner"})
    data = pax(b"22 GNU.sparse.major=1\n", "s.tar")[:2 * BLOCK] + tar_bytes({"s.tar": inner, "b.txt": b"b"})
    members, faults = walked(written(tmp_path / "a.tar", data))
    assert [member.name for member in members] == ["b.txt"] and len(faults) == 1
