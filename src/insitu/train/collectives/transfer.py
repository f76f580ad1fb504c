"""Moves plain values from one rank of a group to all others, whatever shards the ranks host."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
from numpy.typing import NDArray

from insitu.exchange import Group
from insitu.exchange.pages import aligned_empty
from insitu.train.collectives.serialization import dtype_of, pack, unpack

CHUNK_BYTES = 8 << 20
"""What is sent at once: bounds the memory that the transport sets aside for it."""
_NOTE_BYTES = 1024


def share(group: Group, root: int, value: Any = None, *, wanted: bool = True) -> Any:
    """The plain `value` of rank `root`, in each rank. Arrays are sent piece by piece, into memory that is the
    receiver's own.

    Where it isn't `wanted`, the rank takes part, keeps nothing and returns None. Collective; raises
    NotPlain at the root.
    """
    here = group.rank == root
    parcel = pack(value) if here else None
    head = json.dumps([parcel.tree, parcel.kinds]).encode() if parcel else b""
    length = group.broadcast(np.array([len(head)], np.int64), root)
    told = np.zeros(-(-int(length[0]) // 8) * 8, np.uint8)
    told[: len(head)] = np.frombuffer(head, np.uint8)
    _broadcast(group, root, told)
    tree, kinds = json.loads(told[: int(length[0])].tobytes())
    scratch = np.empty(0 if here or wanted else CHUNK_BYTES, np.uint8)
    arrays = []
    for index, (name, shape) in enumerate(kinds):
        if parcel is not None:
            _broadcast(group, root, _flat(parcel.arrays[index]))
        elif wanted:
            arrays.append(aligned_empty(shape, dtype_of(name)))
            _broadcast(group, root, _flat(arrays[-1]))
        else:
            _discard(group, root, int(np.prod(shape)) * dtype_of(name).itemsize, scratch)
    if parcel is not None:
        return value
    return unpack(tree, arrays) if wanted else None


def _flat(array: NDArray[Any]) -> NDArray[np.uint8]:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def _broadcast(group: Group, root: int, data: NDArray[np.uint8]) -> None:
    for start in range(0, len(data), CHUNK_BYTES):
        group.broadcast(data[start : start + CHUNK_BYTES], root)


def _discard(group: Group, root: int, size: int, scratch: NDArray[np.uint8]) -> None:
    for start in range(0, size, CHUNK_BYTES):
        group.broadcast(scratch[: min(CHUNK_BYTES, size - start)], root)


def exchange_notes(group: Group, note: Any) -> list[Any]:
    """What each rank says of itself, by rank: JSON of up to 1 KB. Also from ranks that host no shard."""
    text = json.dumps(note).encode()
    if len(text) > _NOTE_BYTES:
        raise ValueError(f"A note has up to {_NOTE_BYTES} bytes. Received: {len(text)}")
    notes = []
    for rank in range(group.size):
        row = np.zeros(_NOTE_BYTES, np.uint8)
        if rank == group.rank:
            row[: len(text)] = np.frombuffer(text, np.uint8)
        group.broadcast(row, rank)
        notes.append(json.loads(row.tobytes().rstrip(b"\0")))
    return notes
