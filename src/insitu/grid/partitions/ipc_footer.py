"""Pure: where the record batches of an Arrow IPC file lie, found in its footer without reading them.

pyarrow gives batches by number, but not their places. The footer is a FlatBuffers table (`Footer` of Arrow's
File.fbs) with a vector of one struct for each batch: int64 offset, int32 bytes of the metadata, 4 bytes of
padding, int64 bytes of the body.
"""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import numpy.typing as npt

MAGIC = b"ARROW1"
TAIL_BYTES = 4 + len(MAGIC)
"""At the end of the file: int32 bytes of the footer, the magic word."""
PLACE = np.dtype(
    {
        "names": ["offset", "metadata_bytes", "body_bytes"],
        "formats": ["<i8", "<i4", "<i8"],
        "offsets": [0, 8, 16],
        "itemsize": 24,
    }
)
"""The place of one batch: the message begins at `offset`, its body `metadata_bytes` later."""
_RECORD_BATCHES = 3
"""The number of the field in the table `Footer`."""


def footer_bytes(tail: bytes, file_bytes: int) -> int:
    """Return the length of the footer, which ends TAIL_BYTES before the end of the file. Raises ValueError.

    `tail` are the file's last TAIL_BYTES.
    """
    if len(tail) != TAIL_BYTES or tail[4:] != MAGIC:
        raise ValueError("its end isn't that of an Arrow file")
    (size,) = struct.unpack("<i", tail[:4])
    if not 0 < size <= file_bytes - TAIL_BYTES:
        raise ValueError(f"its footer has {size} bytes in a file of {file_bytes}")
    return int(size)


def read_places(footer: bytes, body_end: int) -> npt.NDArray[Any]:
    """Return the places of all batches, in their order: PLACE[n]. Raises ValueError.

    Each lies in [0, body_end), where `body_end` is the byte of the file at which the footer begins, and none
    overlaps with another.
    """
    places = np.frombuffer(_find_vector(footer), PLACE)
    # Each number by itself first, so that no sum overflows.
    within = all(((places[name] >= 0) & (places[name] <= body_end)).all() for name in PLACE.names or ())
    ends = places["offset"] + places["metadata_bytes"] + places["body_bytes"]
    if not within or (ends > np.append(places["offset"][1:], body_end)[: len(places)]).any():
        raise ValueError("its footer gives places of blocks that can't be right")
    return places


def _find_vector(footer: bytes) -> memoryview:
    """Return the bytes of the vector `recordBatches`."""
    try:
        (table,) = struct.unpack_from("<I", footer, 0)
        (back,) = struct.unpack_from("<i", footer, table)
        vtable = table - back
        if vtable < 0:
            raise ValueError("its footer is damaged")
        (vtable_bytes,) = struct.unpack_from("<H", footer, vtable)
        entry = 4 + 2 * _RECORD_BATCHES
        field = struct.unpack_from("<H", footer, vtable + entry)[0] if entry < vtable_bytes else 0
        if not field:
            return memoryview(b"")
        (forward,) = struct.unpack_from("<I", footer, table + field)
        vector = table + field + forward
        (count,) = struct.unpack_from("<I", footer, vector)
    except struct.error as error:
        raise ValueError(f"its footer is damaged ({error})") from error
    end = vector + 4 + count * PLACE.itemsize
    if end > len(footer):
        raise ValueError(f"its footer names {count} blocks, more than it holds")
    return memoryview(footer)[vector + 4 : end]
