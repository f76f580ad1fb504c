"""Send serializable values from one rank of a group to all others, whichever shards the ranks host."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
from numpy.typing import NDArray

from insitu.base.serialization import decode, encode, parse_dtype
from insitu.exchange import Group, aligned_empty

CHUNK_BYTES = 8 << 20
"""Size of one send. It bounds the memory that the transport sets aside."""
_MAX_JSON_BYTES = 1024


def broadcast_value(group: Group, root: int, value: Any = None, *, keep: bool = True) -> Any:
    """Return the serializable `value` of rank `root` in each rank. Arrays are sent in chunks, into memory
    that the receiver owns.

    A rank with `keep` False takes part, stores nothing and returns None. Collective. Raises NotSerializable
    at the root.
    """
    is_root = group.rank == root
    payload = encode(value) if is_root else None
    own_header = json.dumps([payload.tree, payload.specs]).encode() if payload else b""
    length = group.broadcast(np.array([len(own_header)], np.int64), root)
    header = np.zeros(-(-int(length[0]) // 8) * 8, np.uint8)
    header[: len(own_header)] = np.frombuffer(own_header, np.uint8)
    _broadcast(group, root, header)
    tree, specs = json.loads(header[: int(length[0])].tobytes())
    scratch = np.empty(0 if is_root or keep else CHUNK_BYTES, np.uint8)
    arrays = []
    for index, (name, shape) in enumerate(specs):
        if payload is not None:
            _broadcast(group, root, _flat(payload.arrays[index]))
        elif keep:
            arrays.append(aligned_empty(shape, parse_dtype(name)))
            _broadcast(group, root, _flat(arrays[-1]))
        else:
            _discard(group, root, int(np.prod(shape)) * parse_dtype(name).itemsize, scratch)
    if payload is not None:
        return value
    return decode(tree, arrays) if keep else None


def _flat(array: NDArray[Any]) -> NDArray[np.uint8]:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def _broadcast(group: Group, root: int, data: NDArray[np.uint8]) -> None:
    for start in range(0, len(data), CHUNK_BYTES):
        group.broadcast(data[start : start + CHUNK_BYTES], root)


def _discard(group: Group, root: int, size: int, scratch: NDArray[np.uint8]) -> None:
    for start in range(0, size, CHUNK_BYTES):
        group.broadcast(scratch[: min(CHUNK_BYTES, size - start)], root)


def all_gather_json(group: Group, own: Any) -> list[Any]:
    """Return each rank's `own`, by rank: JSON of up to 1 KB. Ranks that host no shard contribute too."""
    text = json.dumps(own).encode()
    if len(text) > _MAX_JSON_BYTES:
        raise ValueError(f"A rank contributes up to {_MAX_JSON_BYTES} bytes of JSON. Received: {len(text)}")
    values = []
    for rank in range(group.size):
        row = np.zeros(_MAX_JSON_BYTES, np.uint8)
        if rank == group.rank:
            row[: len(text)] = np.frombuffer(text, np.uint8)
        group.broadcast(row, rank)
        values.append(json.loads(row.tobytes().rstrip(b"\0")))
    return values
