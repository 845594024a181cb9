"""Small tar files for tests, whole and damaged."""

import io
import os
import tarfile
from pathlib import Path


def tar_bytes(members: dict[str, bytes], format: int = tarfile.PAX_FORMAT) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=format) as tar:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return file.getvalue()


def pairs(count: int) -> dict[str, bytes]:
    """`count` samples of two fields, of unequal sizes."""
    members = {}
    for number in range(count):
        members[f"{number:06}.cls"] = str(number % 10).encode()
        members[f"{number:06}.txt"] = f"sample {number} ".encode() * (40 * number + 3)
    return members


def written(path: Path, data: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def with_byte(data: bytes, at: int, value: int) -> bytes:
    return data[:at] + bytes([value]) + data[at + 1:]


def flip_on_disk(path: Path, at: int) -> None:
    """Change one byte and keep the times, as a failing disk does."""
    times = path.stat()
    data = path.read_bytes()
    path.write_bytes(with_byte(data, at, data[at] ^ 1))
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
