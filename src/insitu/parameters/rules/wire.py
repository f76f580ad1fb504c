"""Pure: the messages between workers and servers. Fixed headers, JSON of bounded length, raw numbers.

    magic, kind, request, length of the JSON, length of the numbers  |  JSON object  |  numbers

The JSON object lists the message's arrays under "arrays": `[dtype, shape, segment, offset]` each. Segment -1
is the message itself: its arrays follow each other, each aligned to the size of its items. Any other segment
is memory that both sides share, and the message carries no numbers for that array.
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

from insitu.base.errors import ParameterError
from insitu.parameters.rules.sharding_plan import named_dtype

PROTOCOL_VERSION = 3
"""Increase it with each change after which workers and servers of two versions can't talk to each other."""
REQUEST, REPLY, FAILURE = 1, 2, 3
HEADER = struct.Struct("!2sBxQIQ")
MAGIC = b"iP"
META_LIMIT = 64 << 20
"""Most bytes of JSON in one message."""
INLINE = -1
"""The segment number of arrays that the message itself carries."""
WIRE_DTYPES = ("float32", "float64", "float16", "bfloat16", "int64", "int32", "uint32", "uint8")
_MAX_DIMENSIONS = 32
_MAX_LENGTH = 1 << 48
"""Most elements along one dimension, and most bytes of an offset."""

Array = NDArray[Any]


class MalformedMessage(ParameterError):
    """Bytes that are no message of this protocol. The connection must be closed."""


@dataclass(frozen=True, slots=True)
class BufferRef:
    """The position of an array in shared memory."""

    #: Number of the segment on this connection; see `Connection.attach`.
    segment: int
    #: Bytes from the segment's start.
    offset: int


@dataclass(slots=True)
class Message:
    """One request or answer."""

    #: REQUEST, REPLY or FAILURE.
    kind: int
    #: Number of the request, chosen by the sender; the answer repeats it.
    request: int
    #: The JSON object, without "arrays".
    meta: dict[str, Any]
    #: The arrays that come with it.
    arrays: Sequence[Array] = ()
    #: The position of each array in shared memory, None for those in the message. Empty: all are.
    refs: Sequence[BufferRef | None] = field(default=())


def wire_dtype(name: str) -> np.dtype[Any]:
    """Return the dtype of this name. Raises MalformedMessage unless it is one of WIRE_DTYPES."""
    if name not in WIRE_DTYPES:
        raise MalformedMessage(
            f"An array's dtype is one of {', '.join(WIRE_DTYPES)}. Received: {str(name)[:40]!r}"
        )
    return named_dtype(name)


def bytes_of(array: Array) -> memoryview:
    """Return the bytes of a contiguous array, without a copy."""
    return memoryview(array.reshape(-1).view(np.uint8))  # type: ignore[arg-type]


def encode(message: Message) -> list[memoryview]:
    """Return the buffers to send one after the other.

    Contiguous arrays aren't copied: they must not change until they are sent. Raises TypeError for a
    description that JSON can't hold, ParameterError for one that is too long.
    """
    refs = message.refs or (None,) * len(message.arrays)
    described, buffers, length = [], [], 0
    for array, ref in zip(message.arrays, refs, strict=True):
        if ref is not None:
            described.append([array.dtype.name, array.shape, ref.segment, ref.offset])
            continue
        described.append([array.dtype.name, array.shape, INLINE, 0])
        if not array.nbytes:
            continue
        padding = -length % array.dtype.itemsize
        if padding:
            buffers.append(memoryview(bytes(padding)))
        buffers.append(bytes_of(np.ascontiguousarray(array)))
        length += padding + array.nbytes
    meta = {**message.meta, "arrays": described} if described else message.meta
    text = json.dumps(meta, separators=(",", ":"), default=_to_builtin).encode()
    if len(text) > META_LIMIT:
        raise ParameterError(
            f"A message's description has at most {META_LIMIT} bytes. Received: {len(text)}. Define fewer "
            "variables, or give them shorter names"
        )
    head = HEADER.pack(MAGIC, message.kind, message.request, len(text), length)
    return [memoryview(head + text), *buffers]


def _to_builtin(value: Any) -> Any:
    """Convert a NumPy scalar, which json doesn't know, to Python's."""
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"A message is made of plain values. Received: {type(value).__name__}")


def read_header(data: bytes | bytearray | memoryview) -> tuple[int, int, int, int]:
    """Return (kind, request, bytes of JSON, bytes of numbers). Raises MalformedMessage."""
    magic, kind, request, meta, payload = HEADER.unpack_from(data)
    if magic != MAGIC or kind not in (REQUEST, REPLY, FAILURE):
        raise MalformedMessage(
            "A message between workers and servers begins with its header. "
            f"Received: {bytes(data[: HEADER.size])!r}"
        )
    if meta > META_LIMIT:
        raise MalformedMessage(f"A message's description has at most {META_LIMIT} bytes. Received: {meta}")
    return kind, request, meta, payload


def decode(
    kind: int,
    request: int,
    text: bytes | bytearray,
    payload: Array,
    get_segment: Callable[[int], Array],
) -> Message:
    """Return the message whose JSON is `text` and whose numbers are `payload`, uint8[n].

    Its arrays are views of `payload` or of the memory that `get_segment(number)` returns. Raises
    MalformedMessage if the JSON is wrong or an array would be outside.
    """
    try:
        meta = json.loads(text)
    except (ValueError, RecursionError) as error:  # too many lists within each other
        raise MalformedMessage(f"A message's description must be JSON of few levels: {error}") from error
    if not isinstance(meta, dict):
        raise MalformedMessage(
            f"A message's description must be a JSON object. Received: {type(meta).__name__}"
        )
    described = meta.pop("arrays", None)
    if described is None:
        return Message(kind, request, meta)
    arrays: list[Array] = []
    refs: list[BufferRef | None] = []
    position = 0
    for name, shape, number, offset in _parse_descriptions(described):
        dtype = wire_dtype(name)
        size = math.prod(shape) * dtype.itemsize
        if number == INLINE:
            position += -position % dtype.itemsize if size else 0
            arrays.append(_make_view(payload, position, size, dtype, shape))
            refs.append(None)
            position += size
        else:
            arrays.append(_make_view(get_segment(number), offset, size, dtype, shape))
            refs.append(BufferRef(number, offset))
    return Message(kind, request, meta, arrays, refs)


def _parse_descriptions(described: Any) -> list[tuple[str, tuple[int, ...], int, int]]:
    parsed = []
    try:
        for name, shape, number, offset in described:
            lengths = tuple(shape)
            if len(lengths) > _MAX_DIMENSIONS or not all(map(_is_length, (*lengths, offset, number + 1))):
                raise ValueError(f"an array of shape {lengths!s:.100} at {offset!s:.20}")
            parsed.append((str(name), lengths, number, offset))
    except (TypeError, ValueError) as error:
        raise MalformedMessage(f"A message describes its arrays wrongly: {error}") from error
    return parsed


def _is_length(value: Any) -> bool:
    return type(value) is int and 0 <= value <= _MAX_LENGTH


def _make_view(memory: Array, offset: int, size: int, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Array:
    if not size:
        try:
            return np.empty(shape, dtype)
        except ValueError as error:  # the other dimensions are too long
            raise MalformedMessage(f"A message describes its arrays wrongly: {error}") from error
    if offset + size > memory.size or offset % dtype.itemsize:
        raise MalformedMessage(
            f"An array must be within {memory.size} bytes. Received: {size} bytes at {offset}"
        )
    return memory[offset : offset + size].view(dtype).reshape(shape)


def make_failure(request: int, error: Exception) -> Message:
    """Return the answer to a request that failed: the error's class name and message."""
    meta: Mapping[str, Any] = {"error": type(error).__name__, "message": str(error)}
    return Message(FAILURE, request, dict(meta))
