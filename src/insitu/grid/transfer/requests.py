"""What goes over the wire: requests as JSON, checked field by field, and rows as chunks of plain bytes.

A request names a partition by cache, version and number, never a path. Names are checked as they are
everywhere in insitu, so none leads out of the store.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, TypeVar

import pyarrow as pa

from insitu.base.errors import InputError
from insitu.base.spec import CacheSpec, check_cache_name, check_simple_name

CHUNK_BYTES = 4 << 20
"""Bytes of a file in one message."""
MAX_LENGTH = 256 << 20
"""Bytes that one request may ask for."""
MAX_FILE_BYTES = 1 << 44
MAX_PARTITION = 1 << 16
MAX_VERSION = 1 << 31
MAX_REQUEST_BYTES = 4096
MAX_UNITS = 1 << 32
MAX_MESSAGE_BYTES = 256 << 20
FILES = "files."
"""How the names of actions begin that are about files of `insitu://`."""
BUSY = "busy"
"""What an owner replies whose partitions don't keep pace."""
SOURCE_FAILED = "source failed"
"""Stands before why a source can't be read, as the result of a node that reads it."""
TEXTS_TOO_LONG = "texts too long"
"""What an owner replies where blocks need fewer rows."""
SCHEMA = pa.schema([("data", pa.binary())])
"""Each record batch is one chunk: a single value."""

_CHECKSUM = re.compile(r"crc32:[0-9a-f]{8}")


def check_number(name: str, value: Any, low: int, high: int) -> int:
    """Return a whole number. Raises InputError for anything else, and outside of [low, high)."""
    if type(value) is not int or not low <= value < high:
        raise InputError(f"{name} must be a whole number in [{low}, {high}). Received: {value!r:.100}")
    return value


def check_text(name: str, value: Any) -> str:
    """Return a text. Raises InputError for anything else."""
    if type(value) is not str:
        raise InputError(f"{name} must be text. Received: {value!r:.100}")
    return value


def parse_spec(name: str, value: Any) -> CacheSpec:
    """Return the version of a cache that another node describes. Raises InputError."""
    try:
        cache = CacheSpec.from_json(value)
    except (ValueError, KeyError, TypeError, AttributeError, InputError) as error:
        raise InputError(f"{name} must describe a version of a cache. Received: {error}") from None
    check_cache_name(check_text("name", cache.name))
    check_number("version", cache.version, 1, MAX_VERSION)
    check_number("partitions", len(cache.partitions), 1, MAX_PARTITION + 1)
    for info in cache.partitions:
        check_number("rows", info.rows, 0, MAX_FILE_BYTES)
        check_number("bytes", info.bytes, 1, MAX_FILE_BYTES)
        if not _CHECKSUM.fullmatch(check_text("checksum", info.checksum)):
            raise InputError(f"checksum must be crc32: and 8 hex digits. Received: {info.checksum!r:.100}")
        for owner in info.owners:
            check_simple_name("A node's name", check_text("owner", owner))
    return cache


@dataclass(frozen=True, slots=True)
class ReadRequest:
    """Asks for a part of a partition's file."""

    #: The name of the cache.
    cache: str
    #: The version of the cache.
    version: int
    #: The partition's number.
    partition: int
    #: The first byte.
    offset: int
    #: Bytes at most; fewer come where the file ends.
    length: int

    def __post_init__(self) -> None:
        check_cache_name(check_text("cache", self.cache))
        check_number("version", self.version, 1, MAX_VERSION)
        check_number("partition", self.partition, 0, MAX_PARTITION)
        check_number("offset", self.offset, 0, MAX_FILE_BYTES)
        check_number("length", self.length, 1, MAX_LENGTH + 1)


@dataclass(frozen=True, slots=True)
class RowsRequest:
    """Announces a message of rows, for the partitions of an import that the node owns."""

    #: What tells the import from others.
    token: str
    #: The number of the unit of the sources that the rows are from.
    unit: int
    #: The number of the message among those of the unit.
    sequence: int
    #: Whether it is the last one of the unit.
    last: bool

    def __post_init__(self) -> None:
        check_simple_name("An import's token", check_text("token", self.token))
        check_number("unit", self.unit, 0, MAX_UNITS)
        check_number("sequence", self.sequence, 0, MAX_FILE_BYTES)
        if type(self.last) is not bool:
            raise InputError(f"last is true or false. Received: {self.last!r:.100}")


Request = TypeVar("Request", ReadRequest, RowsRequest)


def encode_request(request: ReadRequest | RowsRequest) -> bytes:
    return json.dumps(asdict(request)).encode()


def decode_request(kind: type[Request], data: bytes) -> Request:
    """Return the request that `encode_request` was given. Raises InputError for anything else."""
    if len(data) > MAX_REQUEST_BYTES:
        raise InputError(f"A request has {MAX_REQUEST_BYTES} bytes at most. Received: {len(data)}")
    try:
        values = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise InputError(f"A request is JSON. Received: {len(data)} bytes that aren't ({error})") from None
    names = [field.name for field in fields(kind)]
    if not isinstance(values, dict) or sorted(values) != sorted(names):
        raise InputError(f"A request has the fields {', '.join(names)}. Received: others")
    return kind(**values)


def make_chunk(data: bytes) -> pa.RecordBatch:
    """Return a record batch with `data` as its only value, without copying it."""
    offsets = pa.py_buffer(bytes(4) + len(data).to_bytes(4, "little"))
    array = pa.Array.from_buffers(pa.binary(), 1, [None, offsets, pa.py_buffer(data)])
    return pa.RecordBatch.from_arrays([array], schema=SCHEMA)


def chunk_bytes(batch: pa.RecordBatch) -> memoryview:
    """Return the bytes of a chunk, without copying them. Raises InputError if it is none."""
    if batch.schema != SCHEMA or batch.num_rows != 1:
        raise InputError(f"A chunk is one value of bytes. Received: {batch.num_rows} of {batch.schema}")
    column = batch.column(0)
    try:
        column.validate(full=True)
    except pa.ArrowInvalid as error:
        raise InputError(f"A chunk is one value of bytes. Received: one that isn't ({error})") from None
    if column.null_count:
        raise InputError("A chunk is one value of bytes. Received: null")
    return memoryview(column[0].as_buffer())


def encode_message(fields: Mapping[str, Any], payload: bytes = b"") -> bytes:
    """Return fields and bytes as one message: the length of the fields in JSON, these, and the bytes."""
    head = json.dumps(fields).encode()
    return b"".join((len(head).to_bytes(4, "little"), head, payload))


def decode_message(data: bytes) -> tuple[dict[str, Any], bytes]:
    """Return what `encode_message` was given. Raises InputError for anything else."""
    length = int.from_bytes(data[:4], "little")
    try:
        if len(data) < 4 + length:
            raise ValueError("it is cut off")
        fields = json.loads(data[4 : 4 + length])
    except (ValueError, RecursionError) as error:
        raise InputError(f"A message has fields in JSON. Received: {len(data)} bytes ({error})") from None
    if not isinstance(fields, dict):
        raise InputError("The fields of a message are an object. Received: something else")
    return fields, data[4 + length :]
