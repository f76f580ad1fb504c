"""CRC-32 of files, and of parts that are put together.

zlib's CRC-32 does 3 to 4 GB/s here, where blake2b does 0.8 and SHA-256 1.8. It is there against decay and
half-written files, not against forgery.
"""

from __future__ import annotations

import functools
import os
import zlib
from collections.abc import Callable
from pathlib import Path

_NAME = "crc32"
_SLICE_BYTES = 4 << 20
_POLYNOMIAL = 0xEDB88320
"""CRC-32's polynomial, the highest power in the lowest bit."""
_ONE = 1 << 31


def checksum_text(crc32: int) -> str:
    """Return a checksum as in the catalogue: `crc32:` and 8 hex digits."""
    return f"{_NAME}:{crc32:08x}"


def file_checksum(path: Path, on_read: Callable[[int], None] | None = None) -> str:
    """Return the checksum of a whole file, read in slices; leaves it in the page cache.

    With `on_read`, which is called with the bytes of each slice, it isn't left there, if no process uses it.
    """
    crc32 = done = 0
    room = memoryview(bytearray(_SLICE_BYTES))
    with path.open("rb", buffering=0) as file:
        while size := file.readinto(room):
            crc32 = zlib.crc32(room[:size], crc32)
            if on_read is not None:
                os.posix_fadvise(file.fileno(), done, size, os.POSIX_FADV_DONTNEED)
                done += size
                on_read(size)
    return checksum_text(crc32)


def combined(first: int, second: int, second_bytes: int) -> int:
    """Return the CRC-32 of two parts in a row, given each one's and the size of the second.

    Appending n bytes multiplies the first part's remainder by x**(8 n) modulo the polynomial, over GF(2);
    CRC-32's conditioning before and after cancels out. As in zlib's `crc32_combine`, after Mark Adler.
    """
    return _product(_power_of_x(8 * second_bytes), first) ^ second


@functools.lru_cache(maxsize=256)
def _power_of_x(exponent: int) -> int:
    power, square = _ONE, _ONE >> 1
    while exponent:
        if exponent & 1:
            power = _product(power, square)
        square = _product(square, square)
        exponent >>= 1
    return power


def _product(left: int, right: int) -> int:
    """Return left * right modulo the polynomial, over GF(2), the highest power in the lowest bit."""
    product = 0
    for bit in range(31, -1, -1):
        if left >> bit & 1:
            product ^= right
        right = right >> 1 ^ (_POLYNOMIAL if right & 1 else 0)
    return product
