"""Pure: messages between workers and servers. Fixed headers, JSON of bounded length, raw numbers; no pickle.

    magic, kind, request, length of the JSON, length of the numbers  |  JSON object  |  numbers

The JSON object says under "arrays" what the numbers are: `[dtype, shape, segment, offset]` each. Segment -1
is the message itself, where they lie one after the other, each on a multiple of its item's size; any other
is memory that both sides share, and nothing is sent.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from insitu.errors import ParameterError
from insitu.parameters.sharding_plan import named_dtype

PROTOCOL = 1
"""Changes whenever a worker and a server of two versions can't talk."""
REQUEST, REPLY, FAILURE = 1, 2, 3
HEADER = struct.Struct("!2sBxIIQ")
MAGIC = b"iP"
META_LIMIT = 64 << 20
INLINE = -1
DTYPES = ("float32", "float64", "float16", "bfloat16", "int64", "int32", "uint32", "uint8")

Array = NDArray[Any]


class MalformedMessage(ParameterError):
    """What came is no message of this protocol. The connection can't be used any more."""


@dataclass(frozen=True, slots=True)
class BufferRef:
    """Where an array lies in shared memory: the number of a segment, a byte offset in it."""

    segment: int
    offset: int


@dataclass(slots=True)
class Message:
    """`kind` REQUEST, REPLY or FAILURE; `request` ties a reply to its request. `places[i]` says where array
    i lies, None: in the message."""

    kind: int
    request: int
    meta: dict[str, Any]
    arrays: Sequence[Array] = ()
    places: Sequence[BufferRef | None] = field(default=())


def dtype_of(name: str) -> np.dtype[Any]:
    if name not in DTYPES:
        raise MalformedMessage(
            f"An array's dtype is one of {', '.join(DTYPES)}. Received: {str(name)[:40]!r}"
        )
    return named_dtype(name)


def as_bytes(array: Array) -> memoryview:
    """The bytes of a contiguous array."""
    return memoryview(array.reshape(-1).view(np.uint8))  # type: ignore[arg-type]


def encode(message: Message) -> list[memoryview]:
    """The buffers to send one after the other. Arrays aren't copied: they must not change until sent."""
    places = message.places or (None,) * len(message.arrays)
    described, buffers, length = [], [], 0
    for array, place in zip(message.arrays, places, strict=True):
        if place is not None:
            described.append([array.dtype.name, array.shape, place.segment, place.offset])
            continue
        described.append([array.dtype.name, array.shape, INLINE, 0])
        if not array.nbytes:
            continue
        padding = -length % array.dtype.itemsize
        if padding:
            buffers.append(memoryview(bytes(padding)))
        buffers.append(as_bytes(np.ascontiguousarray(array)))
        length += padding + array.nbytes
    meta = {**message.meta, "arrays": described} if described else message.meta
    text = json.dumps(meta, separators=(",", ":"), default=_plain).encode()
    if len(text) > META_LIMIT:
        raise ParameterError(f"A message's description has {META_LIMIT} bytes at most. Received: {len(text)}")
    head = HEADER.pack(MAGIC, message.kind, message.request, len(text), length)
    return [memoryview(head + text), *buffers]


def _plain(value: Any) -> Any:
    """NumPy's numbers are as good as Python's."""
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"A message is made of plain values. Received: {type(value).__name__}")


def read_header(data: bytes | bytearray | memoryview) -> tuple[int, int, int, int]:
    """(kind, request, bytes of JSON, bytes of numbers). Raises Malformed."""
    magic, kind, request, meta, payload = HEADER.unpack_from(data)
    if magic != MAGIC or kind not in (REQUEST, REPLY, FAILURE):
        raise MalformedMessage("What came is not a message between workers and servers")
    if meta > META_LIMIT:
        raise MalformedMessage(f"A message's description has {META_LIMIT} bytes at most. Received: {meta}")
    return kind, request, meta, payload


def decode(
    kind: int, request: int, text: bytes | bytearray, payload: Array, segment: Callable[[int], Array]
) -> Message:
    """The message; arrays are views of `payload` (uint8) or of the memory that `segment(number)` gives.
    Raises Malformed where an array would lie outside."""
    try:
        meta = json.loads(text)
    except ValueError as error:
        raise MalformedMessage(f"A message's description is no JSON: {error}") from error
    if not isinstance(meta, dict):
        raise MalformedMessage("A message's description must be a JSON object")
    described = meta.pop("arrays", None)
    if described is None:
        return Message(kind, request, meta)
    arrays: list[Array] = []
    places: list[BufferRef | None] = []
    at = 0
    for name, shape, number, offset in _described(described):
        dtype = dtype_of(name)
        size = math.prod(shape) * dtype.itemsize
        if number == INLINE:
            at += -at % dtype.itemsize if size else 0
            arrays.append(_view(payload, at, size, dtype, shape))
            places.append(None)
            at += size
        else:
            arrays.append(_view(segment(number), offset, size, dtype, shape))
            places.append(BufferRef(number, offset))
    return Message(kind, request, meta, arrays, places)


def _described(described: Any) -> list[tuple[str, tuple[int, ...], int, int]]:
    found = []
    try:
        for name, shape, number, offset in described:
            lengths = tuple(int(length) for length in shape)
            if len(lengths) > 32 or any(length < 0 for length in lengths) or int(offset) < 0:
                raise ValueError(f"an array of shape {lengths} at {offset}")
            found.append((str(name), lengths, int(number), int(offset)))
    except (TypeError, ValueError) as error:
        raise MalformedMessage(f"A message describes its arrays wrongly: {error}") from error
    return found


def _view(memory: Array, offset: int, size: int, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Array:
    if not size:
        return np.empty(shape, dtype)
    if offset + size > memory.size or offset % dtype.itemsize:
        raise MalformedMessage(f"An array of {size} bytes at {offset} lies outside of {memory.size} bytes")
    return memory[offset : offset + size].view(dtype).reshape(shape)


def error_meta(error: Exception) -> Mapping[str, Any]:
    """What a FAILURE says: the class's name and the message."""
    return {"error": type(error).__name__, "message": str(error)}
