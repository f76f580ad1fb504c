"""64-bit hashes of the values of rows, by which values are counted and versions are compared.

Rows of one column whose bytes are equal hash alike, others differ but for a chance of 2**-64 for each pair.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow.compute as pc
import xxhash

from insitu.grid.layout import splitmix64
from insitu.grid.partitions import text_buffers

Hashes = npt.NDArray[np.uint64]
_PLACE = np.uint64(0xD6E8FEB86659FD93)


def hash_values(values: Any) -> Hashes:
    """Return the hash of each row of a column in the form of `BlockRows`: uint64[rows]."""
    return _hash_fixed(values) if isinstance(values, np.ndarray) else _hash_variable(values)


def _hash_fixed(values: npt.NDArray[Any]) -> Hashes:
    """Mix each word of 8 bytes with its place in the row, and add them up."""
    rows = len(values)
    if not rows:
        return np.empty(0, np.uint64)
    flat: Any = np.ascontiguousarray(values).reshape(rows, -1).view(np.uint8)
    size = flat.shape[1]
    if size % 8:
        padded = np.zeros((rows, size + -size % 8), np.uint8)
        padded[:, :size] = flat
        flat = padded
    words = flat.view(np.uint64)
    if words.shape[1] == 1:
        return splitmix64(words[:, 0])
    places = np.arange(1, words.shape[1] + 1, dtype=np.uint64) * _PLACE
    return splitmix64(splitmix64(words ^ places).sum(axis=1, dtype=np.uint64))


def _hash_variable(values: Any) -> Hashes:
    """Hash each distinct value once: texts repeat."""
    encoded = pc.dictionary_encode(values)
    offsets, data = text_buffers(encoded.dictionary)
    memory: Any = data
    each = [xxhash.xxh3_64_intdigest(memory[start:stop]) for start, stop in pairwise(offsets.tolist())]
    found: Hashes = np.array(each, np.uint64)[encoded.indices.to_numpy(zero_copy_only=False)]
    return found
