"""Pure: the messages of Ignite's thin protocol, version 1.7: requests as bytes, bytes as responses."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from insitu.extensions.ignite.wire import (
    NULL,
    Malformed,
    Reader,
    pack_byte_array,
    pack_int,
    pack_long,
    pack_string,
)
from insitu.grid.layout import Endpoint

VERSION = (1, 7, 0)
ENDPOINTS_FEATURE = 3
"""The bit of the feature by which a server gives the addresses of all nodes."""
GET_SIZE, GET_NAMES, GET_CONFIGURATION = 1020, 1050, 1055
GET_PARTITIONS, GET_ENDPOINTS, GET_TYPE = 1101, 5102, 3002
SCAN, NEXT_PAGE, CLOSE = 2000, 2001, 0
GET_OR_CREATE, PUT_TYPE, STREAM = 1052, 3003, 8000

NO_SUCH_CACHE, SECURITY_VIOLATION, AUTHENTICATION_FAILED, INVALID_NODE_STATE = 1000, 1012, 2000, 10
"""Statuses of responses."""
_HANDSHAKE, _THIN_CLIENT = 1, 2
_FAILED, _TOPOLOGY_CHANGED, _NOTIFICATION = 1, 2, 4
_KEEP_BINARY = 1
_OVERWRITE, _STREAM_BINARY, _FLUSH, _CLOSE_STREAM = 1, 4, 8, 16
_SERVERS_CHOICE = -1
_PRIMARY_ROWS = 2
MOST_PARTITIONS = 65_000
"""The largest number of partitions of a cache of Ignite."""

TopologyVersion = tuple[int, int]
"""(major, minor): the first changes with the servers, the second where caches are made or data moves."""


@dataclass(frozen=True, slots=True)
class Handshake:
    """A server's answer to the handshake."""

    #: The UUID of the server, as 32 hex digits; empty where the connection was refused.
    node: str
    #: Its features, one bit each.
    features: bytes
    #: Why the connection was refused; empty where it wasn't.
    refusal: str = ""
    #: The status that comes with a refusal.
    status: int = 0

    def has_feature(self, bit: int) -> bool:
        """Return whether the server has a feature."""
        return bit // 8 < len(self.features) and bool(self.features[bit // 8] >> bit % 8 & 1)


@dataclass(frozen=True, slots=True)
class Response:
    """The head of a response."""

    #: The number of the request.
    request: int
    #: 0, or what kind of failure it is.
    status: int
    #: The failure in words.
    message: str
    #: The topology version, where it has changed since the last response.
    topology: TopologyVersion | None
    #: Whether it answers no request.
    is_notification: bool
    #: Where its contents begin.
    start: int


@dataclass(frozen=True, slots=True)
class PartitionMap:
    """Which node is primary for each partition of a cache."""

    #: When it held.
    topology: TopologyVersion
    #: `nodes[p]`: the UUID of the primary node; empty where the map doesn't apply to the cache.
    nodes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Field:
    """A field of a class."""

    #: Its name.
    name: str
    #: The type code that it was declared with.
    code: int
    #: The hash of its name.
    number: int


@dataclass(frozen=True, slots=True)
class BinaryType:
    """What the cluster knows of a class whose objects it stores."""

    #: The hash of its name.
    number: int
    #: Its name.
    name: str
    #: All fields that its objects have had.
    fields: tuple[Field, ...] = ()
    #: Schema id -> the numbers of the fields that an object of the schema has, in order.
    schemas: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    #: Of an enum: ordinal -> name.
    constants: Mapping[int, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class CacheConfiguration:
    """What matters here of a cache's configuration."""

    #: The name of the cache.
    name: str
    #: "LOCAL", "REPLICATED" or "PARTITIONED".
    mode: str
    #: Further copies of each partition; many for a replicated cache.
    backups: int
    #: The column that the key of a SQL table makes; empty if it has none.
    key_column: str
    #: The column that a value that is no object makes; empty if it has none.
    value_column: str
    #: The columns of a SQL table that are fields of its key.
    key_fields: frozenset[str]


def encode_handshake(user: str, password: str) -> bytes:
    """Return the first message of a connection. `user` is empty where no authentication is wanted."""
    major, minor, patch = (number.to_bytes(2, "little") for number in VERSION)
    body = bytes([_HANDSHAKE]) + major + minor + patch + bytes([_THIN_CLIENT])
    body += pack_byte_array(bytes([1 << ENDPOINTS_FEATURE]))
    if user:
        body += pack_string(user) + pack_string(password)
    return pack_int(len(body)) + body


def decode_handshake(body: memoryview) -> Handshake:
    reader = Reader(body)
    if reader.read_bool():
        features = reader.read_byte_array()
        return Handshake(reader.read_uuid(), features)
    version = ".".join(str(reader.read_short()) for _ in range(3))
    message = reader.read_text() or f"it speaks version {version} of the protocol"
    return Handshake("", b"", message, reader.read_int() if reader.left else 1)


def encode_request(operation: int, number: int, contents: bytes) -> bytes:
    """Return a request, whose response will have the same `number`."""
    return b"".join(
        [pack_int(10 + len(contents)), operation.to_bytes(2, "little"), pack_long(number), contents]
    )


def decode_response(body: memoryview) -> Response:
    reader = Reader(body)
    request, flags = reader.read_long(), reader.read_short()
    topology = (reader.read_long(), reader.read_int()) if flags & _TOPOLOGY_CHANGED else None
    if flags & _NOTIFICATION:
        return Response(request, 0, "", topology, True, len(body))
    status, message = (reader.read_int(), reader.read_text()) if flags & _FAILED else (0, "")
    return Response(request, status, message, topology, False, reader.position)


def encode_scan(cache: int, page_rows: int, partition: int) -> bytes:
    """Return the contents of a scan of a partition, by pages of so many rows; -1: of all partitions."""
    return (
        pack_int(cache)
        + bytes([_KEEP_BINARY, NULL])
        + pack_int(page_rows)
        + pack_int(partition)
        + bytes([False])
    )


def encode_cursor(cursor: int) -> bytes:
    """Return the contents of a request for the next page, or to close a cursor."""
    return pack_long(cursor)


@dataclass(frozen=True, slots=True)
class Page:
    """Some rows of a scan."""

    #: How many.
    rows: int
    #: Keys and values in turn, as they came.
    data: memoryview
    #: Whether more rows follow.
    more: bool
    #: The number of the cursor.
    cursor: int


def decode_page(contents: memoryview, cursor: int | None) -> Page:
    """Return a page. `cursor` is None for the first one, which begins with its number."""
    reader = Reader(contents)
    number = reader.read_long() if cursor is None else cursor
    rows = reader.read_count(2)
    data = reader.take(reader.left - 1)
    return Page(rows, data, reader.read_bool(), number)


def encode_cache(cache: int) -> bytes:
    """Return the contents of a request for the configuration of a cache."""
    return pack_int(cache) + b"\0"


def encode_size(cache: int) -> bytes:
    return pack_int(cache) + b"\0" + pack_int(1) + bytes([_PRIMARY_ROWS])


def encode_partitions(cache: int) -> bytes:
    return pack_int(1) + pack_int(cache)


def decode_partitions(contents: memoryview, cache: int) -> PartitionMap:
    reader = Reader(contents)
    topology = (reader.read_long(), reader.read_int())
    primaries: dict[int, str] = {}
    for _ in range(reader.read_count()):
        applies = reader.read_bool()
        caches = []
        for _ in range(reader.read_count(4)):
            caches.append(reader.read_int())
            if applies:
                reader.take(reader.read_count(8) * 8)
        nodes = [_read_partitions_of_node(reader) for _ in range(reader.read_count(5))] if applies else []
        if cache in caches:
            primaries |= {partition: node for node, partitions in nodes for partition in partitions}
    if sorted(primaries) != list(range(len(primaries))):
        raise Malformed("the map of partitions has gaps")
    return PartitionMap(topology, tuple(primaries[number] for number in range(len(primaries))))


def _read_partitions_of_node(reader: Reader) -> tuple[str, list[int]]:
    node = reader.read_uuid()
    partitions = [reader.read_int() for _ in range(reader.read_count(4))]
    if any(not 0 <= partition < MOST_PARTITIONS for partition in partitions):
        raise Malformed(f"partitions must be in [0, {MOST_PARTITIONS})")
    return node, partitions


def encode_endpoints() -> bytes:
    """Return the contents of a request for the addresses of all nodes of now."""
    return pack_long(-1) + pack_long(-1)


def decode_endpoints(contents: memoryview) -> list[Endpoint]:
    reader = Reader(contents)
    reader.read_long()
    found = []
    for _ in range(reader.read_count(24)):
        node, port = reader.read_raw_uuid(), reader.read_int()
        found.append(Endpoint(node, port, tuple(reader.read_text() for _ in range(reader.read_count()))))
    return found


def encode_type(number: int) -> bytes:
    return pack_int(number)


def decode_type(contents: memoryview) -> BinaryType | None:
    """Return a type; None where the cluster doesn't know it."""
    reader = Reader(contents)
    if not reader.read_bool():
        return None
    number, name = reader.read_int(), reader.read_text()
    reader.read_string()
    fields = []
    for _ in range(reader.read_count(9)):
        title, code, field_number = reader.read_text(), reader.read_int(), reader.read_int()
        fields.append(Field(title, code, field_number))
    constants = {}
    if reader.read_bool():
        for _ in range(reader.read_count(5)):
            title = reader.read_text()
            constants[reader.read_int()] = title
    schemas = {}
    for _ in range(reader.read_count(8)):
        schema = reader.read_int()
        schemas[schema] = tuple(reader.read_int() for _ in range(reader.read_count(4)))
    return BinaryType(number, name, tuple(fields), schemas, constants)


def encode_put_type(kind: BinaryType) -> bytes:
    """Return the contents of a request that makes a class, or adds its fields and schemas, known."""
    found = [pack_int(kind.number), pack_string(kind.name), bytes([NULL]), pack_int(len(kind.fields))]
    found += [pack_string(f.name) + pack_int(f.code) + pack_int(f.number) for f in kind.fields]
    found += [bytes([False]), pack_int(len(kind.schemas))]
    for schema, numbers in kind.schemas.items():
        found += [pack_int(schema), pack_int(len(numbers)), *map(pack_int, numbers)]
    return b"".join(found)


def encode_stream(cache: int, rows: int, data: bytes) -> bytes:
    """Return the contents of a request that puts rows, keys and values in turn, over those that are there,
    and is answered when they are in the cache."""
    flags = _OVERWRITE | _STREAM_BINARY | _FLUSH | _CLOSE_STREAM
    buffers = pack_int(_SERVERS_CHOICE) + pack_int(_SERVERS_CHOICE)
    head = pack_int(cache) + bytes([flags]) + buffers + bytes([NULL]) + pack_int(rows)
    return head + data


def decode_names(contents: memoryview) -> list[str]:
    reader = Reader(contents)
    return [reader.read_text() for _ in range(reader.read_count())]


def decode_size(contents: memoryview) -> int:
    return Reader(contents).read_long()


_MODES = ("LOCAL", "REPLICATED", "PARTITIONED")


def decode_configuration(contents: memoryview) -> CacheConfiguration:
    """Return what an answer says about a cache; all fields that come before or between are passed over."""
    reader = Reader(contents)
    reader.read_int()
    reader.read_int()  # atomicity
    backups, mode = reader.read_int(), reader.read_int()
    reader.take(1)  # copy on read
    reader.read_string()  # data region
    reader.take(2)  # eager expiry, statistics
    reader.read_string()  # group
    reader.take(8 + 4 + 4)  # lock timeout, asynchronous operations, iterators
    name = reader.read_text()
    reader.take(1 + 4 + 4 + 4 + 1 + 4 + 8 + 8 + 4 + 4 + 8 + 8 + 1 + 4)  # from on-heap to inlined SQL indexes
    reader.read_string()  # SQL schema
    reader.read_int()  # write synchronization
    for _ in range(reader.read_count(2)):
        reader.read_string(), reader.read_string()
    entities = [_read_entity(reader) for _ in range(reader.read_count(5))]
    key, value, fields = entities[0] if len(entities) == 1 else ("", "", frozenset[str]())
    return CacheConfiguration(name, _MODES[mode] if 0 <= mode < 3 else str(mode), backups, key, value, fields)


def _read_entity(reader: Reader) -> tuple[str, str, frozenset[str]]:
    """Read what a SQL table is. Returns the columns that its key and its value make, and its key's fields."""
    reader.read_string(), reader.read_string(), reader.read_string()  # classes of key and value, table
    key, value = reader.read_text(), reader.read_text()
    key_fields = []
    for _ in range(reader.read_count(5)):
        name, _ = reader.read_text(), reader.read_string()
        if reader.read_bool():
            key_fields.append(name)
        reader.read_bool()  # not null
        reader.skip_value()  # default
        reader.take(8)  # precision, scale
    for _ in range(reader.read_count(2)):
        reader.read_string(), reader.read_string()  # aliases
    for _ in range(reader.read_count(2)):
        reader.read_string()
        reader.take(1 + 4)  # kind and inlined bytes of an index
        for _ in range(reader.read_count(2)):
            reader.read_string(), reader.read_bool()
    return key, value, frozenset(key_fields)


def name_list(names: Sequence[str], wanted: str, most: int = 10) -> str:
    """Return names for a message, not all if there are many: those that are like `wanted` first."""
    plain = {name: name.lower() for name in names}
    near = difflib.get_close_matches(wanted.lower(), plain.values(), most, cutoff=0.6)
    ordered = sorted(names, key=lambda name: (plain[name] not in near, name))
    shown = ", ".join(ordered[:most])
    return (shown + (", ..." if len(names) > most else "")) or "none"
