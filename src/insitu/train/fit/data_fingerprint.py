"""Numbers that show whether processes were given the same data. They serve against mistakes, not forgery.

A *fingerprint* is below 2**52, so that a float64 holds it, and is never 0, which means "not taken".
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from insitu.base.errors import InputError
from insitu.train.replica import flatten_batch

WHOLE_BYTES = 16 << 10
"""Bytes of a leaf of a batch up to which all of it is hashed; of a larger one, `_PIECES` pieces."""
_PIECES, _PIECE_WORDS = 61, 16
"""A prime number, since rows are mostly of an even number of words: pieces are of all columns."""
ARRAY_BYTES = 64 << 20
"""Bytes of an array up to which all of it is hashed; of a larger one, `_CHUNKS` chunks."""
_CHUNKS = 256
_TEXTS = 64
_SPARSE_ROWS = 64
_ALL_BITS = 2**64 - 1


def fingerprint_batch(data: Any) -> int:
    """Return the fingerprint of a batch, a structure of arrays. Costs a few microseconds."""
    seed = 0
    for leaf in flatten_batch(data):
        seed = _hash_sample(leaf, seed)
    return _shorten(seed)


def fingerprint_arrays(leaves: Iterable[Any], numbers: Sequence[int] = ()) -> int:
    """Return the fingerprint of whole arrays, and of `numbers` that say in which order they are read."""
    seed = xxhash.xxh3_64_intdigest(repr(tuple(numbers)).encode())
    for leaf in leaves:
        array = leaf if isinstance(leaf, np.ndarray) else None
        seed = _hash_label(leaf, seed)
        if array is None or array.dtype.kind == "O" or array.nbytes <= ARRAY_BYTES:
            seed = _hash_whole(leaf, seed)
            continue
        rows = max(1, ARRAY_BYTES // _CHUNKS // max(1, array.nbytes // len(array)))
        for start in np.linspace(0, len(array) - rows, _CHUNKS).astype(int).tolist():
            seed = xxhash.xxh3_64_intdigest(_bytes_of(array[start : start + rows]), seed)
    return _shorten(seed)


def check_same_data(fingerprints: Sequence[float], where: object) -> None:
    """Raise InputError, in each task, if shards were given different data. `fingerprints` are those of all
    shards; `where` names the step."""
    first = fingerprints[0]
    if all(one == first for one in fingerprints):
        return
    others = [str(shard) for shard, one in enumerate(fingerprints) if one != first]
    raise InputError(
        "Each process must be given the same data, in the same order: it takes its part of each global "
        f"batch. Received: at {where}, the process of shard {', '.join(others)} has another batch than that "
        "of shard 0. Rows would be lost and others trained twice. Begin the script with "
        "keras.utils.set_random_seed(insitu.context().seed), give each shuffle and each random generator the "
        "same seed in all processes, or use an insitu.Dataset, whose shards differ by design."
    )


def _shorten(seed: int) -> int:
    return (seed >> 12) or 1


def _hash_label(leaf: Any, seed: int) -> int:
    """Hash the shape and the dtype."""
    return xxhash.xxh3_64_intdigest(f"{tuple(leaf.shape)} {leaf.dtype}".encode(), seed)


def _hash_sample(leaf: NDArray[Any], seed: int) -> int:
    seed = (seed * 31 + leaf.size) & _ALL_BITS
    if leaf.dtype.hasobject:
        texts = leaf.reshape(-1)[:: max(1, leaf.size // _TEXTS)].tolist()
        return xxhash.xxh3_64_intdigest(repr(texts).encode(), seed)
    if not leaf.flags.c_contiguous:
        leaf = np.ascontiguousarray(leaf)
    if leaf.nbytes <= WHOLE_BYTES:
        return xxhash.xxh3_64_intdigest(leaf.reshape(-1).view(np.uint8).data, seed)
    words = leaf.reshape(-1).view(np.uint8)[: leaf.nbytes // 8 * 8].view(np.uint64)
    pieces = words[: len(words) // _PIECES * _PIECES].reshape(_PIECES, -1)[:, :_PIECE_WORDS]
    return xxhash.xxh3_64_intdigest(pieces.tobytes(), seed)


def _hash_whole(leaf: Any, seed: int) -> int:
    if not isinstance(leaf, np.ndarray):  # SparseRows
        rows = np.unique(np.linspace(0, leaf.shape[0] - 1, _SPARSE_ROWS).astype(int))
        return xxhash.xxh3_64_intdigest(_bytes_of(leaf[rows]), seed)
    if leaf.dtype.hasobject:
        return xxhash.xxh3_64_intdigest(repr(leaf.reshape(-1)[:100_000].tolist()).encode(), seed)
    return xxhash.xxh3_64_intdigest(_bytes_of(leaf), seed)


def _bytes_of(array: NDArray[Any]) -> memoryview:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
