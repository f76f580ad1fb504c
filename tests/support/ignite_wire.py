"""Writes Ignite's binary format, and serves it as a server of Ignite would, for tests without Java."""

from __future__ import annotations

import contextlib
import socket
import ssl
import struct
import threading
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType

from insitu.extensions.ignite import protocol
from insitu.extensions.ignite.protocol import BinaryType, Field
from insitu.extensions.ignite.wire import (
    OBJECT,
    Reader,
    end_of_value,
    hash_name,
    pack_byte_array,
    pack_int,
    pack_long,
    pack_string,
)

NULL = bytes([101])
_USER_TYPE, _HAS_SCHEMA, _HAS_RAW, _ONE_BYTE, _TWO_BYTES, _COMPACT = 0x01, 0x02, 0x04, 0x08, 0x10, 0x20


def number(code: int, form: str, value: float) -> bytes:
    """A value that is one number."""
    return bytes([code]) + struct.pack(f"<{form}", value)


def array(code: int, form: str, values: Sequence[float]) -> bytes:
    return bytes([code]) + struct.pack(f"<i{len(values)}{form}", len(values), *values)


def field_number(name: str) -> int:
    return hash_name(name.lower())


def binary_type(name: str, fields: Sequence[tuple[str, int]], *schemas: Sequence[str]) -> BinaryType:
    """A class with its fields (name, type code), and the names of the fields of each schema."""
    found = tuple(Field(title, code, field_number(title)) for title, code in fields)
    all_names = [title for title, _ in fields]
    numbered = {schema_number(names): tuple(map(field_number, names)) for names in (schemas or (all_names,))}
    return BinaryType(hash_name(name.lower()), name, found, numbered)


def schema_number(names: Sequence[str]) -> int:
    """The id of a schema; only that it differs matters here."""
    return hash_name("/".join(names))


def binary_object(
    kind: BinaryType,
    fields: Sequence[tuple[str, bytes]],
    *,
    compact: bool = True,
    width: int = 0,
    raw: bytes = b"",
) -> bytes:
    """An object with these fields, already written. `width` is that of an offset; 0: what is needed. `raw` is
    what a Binarylizable writes behind its fields."""
    body, offsets = b"", []
    for _, value in fields:
        offsets.append(24 + len(body))
        body += value
    largest = max(offsets, default=0)
    width = width or (1 if largest < 1 << 8 else 2 if largest < 1 << 16 else 4)
    flags = _USER_TYPE | {1: _ONE_BYTE, 2: _TWO_BYTES, 4: 0}[width]
    flags |= (_HAS_SCHEMA if fields else 0) | (_COMPACT if compact else 0)
    footer = b""
    for (name, _), offset in zip(fields, offsets, strict=True):
        footer += b"" if compact else pack_int(field_number(name))
        footer += offset.to_bytes(width, "little")
    if raw and fields:
        flags |= _HAS_RAW
        footer += pack_int(24 + len(body))
        body += raw
    names = [name for name, _ in fields]
    head = struct.pack(
        "<BBHiiiii",
        *(OBJECT, 1, flags, kind.number, 0, 24 + len(body) + len(footer)),
        *(schema_number(names), 24 + len(body)),
    )
    return head + body + footer


@dataclass
class FakeCache:
    """A cache: rows (key, value) of each partition, written."""

    partitions: list[list[tuple[bytes, bytes]]]
    types: Sequence[BinaryType] = ()
    name: str = "CACHE"
    key_column: str = ""
    replicated: bool = False

    @property
    def rows(self) -> int:
        return sum(map(len, self.partitions))


DRAWING = binary_type("example.Drawing", [("image", 12), ("label", 3)])


def drawing(index: int) -> tuple[bytes, bytes]:
    image = bytes((index + place) % 256 for place in range(12))
    fields = [("image", pack_byte_array(image)), ("label", number(3, "i", index % 10))]
    return number(4, "q", index), binary_object(DRAWING, fields)


def drawings(rows: int, partitions: int = 5) -> FakeCache:
    """A cache whose rows are in their partitions in the reverse order of their keys."""
    return FakeCache(
        [[drawing(index) for index in reversed(range(p, rows, partitions))] for p in range(partitions)],
        [DRAWING],
    )


Behaviour = Callable[["FakeServer", int, int], bytes | None]
"""Called with the server, the operation and how many requests of it there were; returns raw bytes that are
sent instead of the response and after which the connection is closed, or None."""


@dataclass
class FakeCluster:
    """Servers of one cluster. `primaries[p]` is the number of the server that has partition p."""

    cache: FakeCache
    primaries: list[int] = field(default_factory=list)
    topology: tuple[int, int] = (1, 0)
    servers: list[FakeServer] = field(default_factory=list)
    password: str = ""
    page_rows: int | None = None
    created: str = ""

    def add(
        self, behave: Behaviour | None = None, tls: ssl.SSLContext | None = None, host: str = "127.0.0.1"
    ) -> FakeServer:
        server = FakeServer(self, len(self.servers), behave, tls, host)
        self.servers.append(server)
        return server

    def address(self, *numbers: int) -> str:
        chosen = [self.servers[n] for n in numbers] if numbers else self.servers
        named = ",".join(f"{server.host}:{server.port}" for server in chosen)
        return f"ignite://{named}/{self.cache.name}"

    def __enter__(self) -> FakeCluster:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for server in self.servers:
            server.stop()


def node_name(server: int) -> str:
    return f"{1:016x}{server:016x}"


class FakeServer:
    """Answers requests of the thin protocol in threads."""

    def __init__(
        self,
        cluster: FakeCluster,
        number: int,
        behave: Behaviour | None,
        tls: ssl.SSLContext | None,
        host: str = "127.0.0.1",
    ) -> None:
        self.cluster, self.number, self._behave, self._tls = cluster, number, behave, tls
        self.host = host
        self._listener = socket.create_server((host, 0))
        self.port = int(self._listener.getsockname()[1])
        self.requests: dict[int, int] = {}
        self.scanned: list[int] = []
        self.alive = True
        self.node = node_name(number)
        self._open: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def stop(self) -> None:
        """End the server at once, with all its connections."""
        self.alive = False
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for connection in self._open:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                self._open.append(connection)
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError, EOFError), contextlib.closing(connection):
            if self._tls is not None:
                connection = self._tls.wrap_socket(connection, server_side=True)
                self._open.append(connection)
            handshake = _read(connection)
            if self._answered_oddly(connection, 1):
                return
            connection.sendall(_framed(self._greet(handshake)))
            cursors: dict[int, tuple[list[tuple[bytes, bytes]], int]] = {}
            while True:
                request = _read(connection)
                operation, request_id = struct.unpack_from("<hq", request)
                if self._answered_oddly(connection, operation):
                    return
                body = self._answer(operation, request[10:], cursors)
                head = pack_long(request_id)
                if isinstance(body, str):
                    connection.sendall(_framed(head + b"\1\0" + pack_int(1000) + pack_string(body)))
                else:
                    connection.sendall(_framed(head + b"\0\0" + body))

    def _answered_oddly(self, connection: socket.socket, operation: int) -> bool:
        self.requests[operation] = self.requests.get(operation, 0) + 1
        odd = self._behave(self, operation, self.requests[operation]) if self._behave else None
        if odd is not None:
            connection.sendall(odd)
        return odd is not None

    def _greet(self, handshake: bytes) -> bytes:
        password = self.cluster.password
        if password and pack_string(password) not in handshake:
            version = struct.pack("<hhh", 1, 7, 0)
            return b"\0" + version + pack_string("The user name or password is incorrect") + pack_int(2000)
        return b"\1" + pack_byte_array(b"\xff\xff") + bytes([10]) + _uuid(self.node)

    def _answer(
        self, operation: int, contents: bytes, cursors: dict[int, tuple[list[tuple[bytes, bytes]], int]]
    ) -> bytes | str:
        cluster, cache = self.cluster, self.cluster.cache
        if operation == protocol.GET_NAMES:
            return pack_int(2) + pack_string("other") + pack_string(cache.name)
        if operation == protocol.GET_CONFIGURATION:
            return configuration(cache)
        if operation == protocol.GET_SIZE:
            return pack_long(cache.rows)
        if operation == protocol.GET_PARTITIONS:
            return self._partitions()
        if operation == protocol.GET_ENDPOINTS:
            return self._endpoints()
        if operation == protocol.GET_TYPE:
            return type_answer(cache.types, struct.unpack("<i", contents)[0])
        if operation == protocol.SCAN:
            rows, partition = struct.unpack_from("<ii", contents, 6)
            self.scanned.append(partition)
            chosen = cache.partitions if partition < 0 else [cache.partitions[partition]]
            cursor = len(cursors) + 1
            cursors[cursor] = ([row for part in chosen for row in part], cluster.page_rows or rows)
            return pack_long(cursor) + _page(cursors, cursor)
        if operation == protocol.NEXT_PAGE:
            return _page(cursors, struct.unpack("<q", contents)[0])
        if operation == protocol.CLOSE:
            return b""
        if operation == protocol.STREAM:
            return self._stream(contents)
        if operation == protocol.PUT_TYPE:
            cache.types = [*cache.types, _decode_put_type(contents)]
            return b""
        if operation == protocol.GET_OR_CREATE:
            cache.name = cluster.created = Reader(contents).read_text()
            return b""
        return f"operation {operation} isn't known"

    def _stream(self, contents: bytes) -> bytes:
        """Put rows over those with their keys, into the partition that the bytes of the key choose."""
        partitions = self.cluster.cache.partitions
        rows, place = struct.unpack_from("<i", contents, 14)[0], 18
        for _ in range(rows):
            middle = end_of_value(contents, place)
            end = end_of_value(contents, middle)
            key, value, place = contents[place:middle], contents[middle:end], end
            chosen = zlib.crc32(key) % len(partitions)
            partitions[chosen] = [row for row in partitions[chosen] if row[0] != key] + [(key, value)]
        return pack_long(0)

    def _partitions(self) -> bytes:
        cluster, cache = self.cluster, self.cluster.cache
        head = struct.pack("<qii", *cluster.topology, 1)
        number = pack_int(hash_name(cache.name))
        if cache.replicated:
            return head + b"\0" + pack_int(1) + number
        found = head + b"\1" + pack_int(1) + number + pack_int(0)
        nodes = sorted(set(cluster.primaries))
        found += pack_int(len(nodes))
        for node in nodes:
            own = [p for p, primary in enumerate(cluster.primaries) if primary == node]
            found += bytes([10]) + _uuid(node_name(node)) + struct.pack(f"<i{len(own)}i", len(own), *own)
        return found

    def _endpoints(self) -> bytes:
        alive = [server for server in self.cluster.servers if server.alive]
        found = pack_long(self.cluster.topology[0]) + pack_int(len(alive))
        for server in alive:
            found += _uuid(node_name(server.number)) + pack_int(server.port) + pack_int(1)
            found += pack_string(server.host)
        return found + pack_int(0)


def _uuid(name: str) -> bytes:
    return int(name[:16], 16).to_bytes(8, "little") + int(name[16:], 16).to_bytes(8, "little")


def _page(cursors: dict[int, tuple[list[tuple[bytes, bytes]], int]], cursor: int) -> bytes:
    rows, size = cursors[cursor]
    now, later = rows[:size], rows[size:]
    cursors[cursor] = (later, size)
    return pack_int(len(now)) + b"".join(key + value for key, value in now) + bytes([bool(later)])


def _decode_put_type(contents: bytes) -> BinaryType:
    found = protocol.decode_type(memoryview(b"\1" + contents))
    assert found is not None
    return found


def type_answer(types: Sequence[BinaryType], number: int) -> bytes:
    """The response to the request for a class."""
    kind = next((kind for kind in types if kind.number == number), None)
    if kind is None:
        return b"\0"
    found = b"\1" + pack_int(kind.number) + pack_string(kind.name) + NULL + pack_int(len(kind.fields))
    for part in kind.fields:
        found += pack_string(part.name) + pack_int(part.code) + pack_int(part.number)
    found += b"\0" + pack_int(len(kind.schemas))
    for schema, numbers in kind.schemas.items():
        found += struct.pack(f"<ii{len(numbers)}i", schema, len(numbers), *numbers)
    return found


def configuration(cache: FakeCache) -> bytes:
    """The response to the request for a cache's configuration, of which only some is of interest."""
    found = struct.pack("<iii", 0, 1, 1 if cache.replicated else 2) + b"\0" + NULL + b"\0\0" + NULL
    found += bytes(16) + pack_string(cache.name) + bytes(63) + NULL + pack_int(0) + pack_int(0)
    if not cache.key_column:
        return pack_int(len(found)) + found + pack_int(0) + b"\0"
    found += pack_int(1) + NULL * 3 + pack_string(cache.key_column) + NULL + bytes(12)
    return pack_int(len(found)) + found + b"\0"


def _read(connection: socket.socket) -> bytes:
    return _exactly(connection, struct.unpack("<i", _exactly(connection, 4))[0])


def _exactly(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = connection.recv(size - len(data))
        if not part:
            raise EOFError
        data += part
    return data


def _framed(body: bytes) -> bytes:
    return pack_int(len(body)) + body


def cluster_of(
    servers: int, cache: FakeCache, behave: Behaviour | None = None, tls: ssl.SSLContext | None = None
) -> FakeCluster:
    """Servers that hold the partitions in turn; `behave` is how the first one does."""
    cluster = FakeCluster(cache, [p % servers for p in range(len(cache.partitions))])
    for index in range(servers):
        cluster.add(behave if index == 0 else None, tls)
    return cluster
