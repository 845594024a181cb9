"""CRC-32, as zlib counts it, at the speed of memory: a sample is checked each time it is read."""

from __future__ import annotations

from isal import isal_zlib


def crc32(data: bytes, value: int = 0) -> int:
    """Of `data`, going on from the `value` of what came before. isal uses the processor's carry-less product (Gopal et
    al., "Fast CRC computation for generic polynomials using PCLMULQDQ instruction", 2009): some ten times zlib's."""
    return int(isal_zlib.crc32(data, value))
