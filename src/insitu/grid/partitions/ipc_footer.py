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

from insitu.grid.partitions.flat_tables import find_field, find_root, find_vector

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
    start, count = find_vector_of_places(footer)
    places = np.frombuffer(footer, PLACE, count, start) if count else np.empty(0, PLACE)
    # Each number by itself first, so that no sum overflows.
    within = all(((places[name] >= 0) & (places[name] <= body_end)).all() for name in PLACE.names or ())
    ends = places["offset"] + places["metadata_bytes"] + places["body_bytes"]
    if not within or (ends > np.append(places["offset"][1:], body_end)[: len(places)]).any():
        raise ValueError("its footer gives places of blocks that can't be right")
    return places


def find_vector_of_places(footer: bytes) -> tuple[int, int]:
    """Return (first byte, places) of the vector `recordBatches` of a footer. Raises ValueError."""
    try:
        field = find_field(footer, find_root(footer), _RECORD_BATCHES)
        start, count = find_vector(footer, field) if field else (0, 0)
    except ValueError as error:
        raise ValueError(f"its footer is damaged ({error})") from error
    if start + count * PLACE.itemsize > len(footer):
        raise ValueError(f"its footer names {count} blocks, more than it holds")
    return start, count
