"""A cluster of Ignite: connections to its servers, and what they say of a cache. Goes on with another server
where one fails.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from types import TracebackType
from typing import TypeVar

from insitu.base.errors import SourceError
from insitu.extensions.ignite.address import Address, ConnectionSettings, HostPort
from insitu.extensions.ignite.connection import (
    Connection,
    ConnectionFailed,
    ServerFailure,
    TooLarge,
    raise_final,
)
from insitu.extensions.ignite.protocol import (
    CLOSE,
    ENDPOINTS_FEATURE,
    GET_CONFIGURATION,
    GET_ENDPOINTS,
    GET_NAMES,
    GET_OR_CREATE,
    GET_PARTITIONS,
    GET_SIZE,
    GET_TYPE,
    NEXT_PAGE,
    PUT_TYPE,
    SCAN,
    STREAM,
    BinaryType,
    CacheConfiguration,
    Page,
    TopologyVersion,
    decode_configuration,
    decode_endpoints,
    decode_names,
    decode_page,
    decode_partitions,
    decode_size,
    decode_type,
    encode_cache,
    encode_cursor,
    encode_endpoints,
    encode_partitions,
    encode_put_type,
    encode_scan,
    encode_size,
    encode_stream,
    encode_type,
    name_list,
)
from insitu.extensions.ignite.wire import Malformed, hash_name, pack_string
from insitu.grid.layout import Endpoint

logger = logging.getLogger("insitu")
Result = TypeVar("Result")
Candidate = tuple[HostPort, str]
"""A server, and the id of the node that it must be; empty: any."""

_FAILOVER = 2
"""Timeouts in which a partition is read again before that is an error."""
_PAUSES = (0.05, 0.2, 0.5, 1.0)
"""Seconds between attempts, so that the cluster can notice what has failed."""
_SCANS_AHEAD = 4
"""Partitions that one connection asks for at once."""
_MOST_EMPTY_PAGES = 16
"""Pages without rows that a server may send one after another; it sends none but as the last one."""
COPIES_IN_MEMORY = 4
"""How often the rows of a partition are in memory while they are read and put into order."""
_MOST_PARTITION_BYTES = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // COPIES_IN_MEMORY
_FEWER_ROWS = 16
"""By how much a page gets fewer rows where it is too large."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Where the partitions of a cache are."""

    #: When it held; (0, 0) where the cluster doesn't say.
    topology: TopologyVersion
    #: The primary node of each partition; empty: the partitions aren't known, so all are read as one.
    primaries: tuple[str, ...]
    #: Node -> where it can be reached.
    endpoints: dict[str, Endpoint] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ScannedPartition:
    """All rows of a partition, as they came."""

    #: Its pages.
    pages: tuple[Page, ...]
    #: The UUID of the node that they came from.
    node: str

    @property
    def rows(self) -> int:
        return sum(page.rows for page in self.pages)

    @property
    def bytes(self) -> int:
        return sum(len(page.data) for page in self.pages)


class Cluster:
    """The servers that hold a cache. Use it in a `with` statement, which closes its connections.

    Several threads may use it. Raises SourceError for all that isn't remedied by another attempt.
    """

    def __init__(self, address: Address, settings: ConnectionSettings) -> None:
        self.address = address
        self._settings = settings
        self._lock = threading.Lock()
        self._idle: dict[HostPort, list[Connection]] = {}
        self._layout: Layout | None = None
        self._unreachable: set[str] = set()
        self._cache = hash_name(address.cache)
        self._closed = False

    def __enter__(self) -> Cluster:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._lock:
            self._closed = True
            idle = [connection for found in self._idle.values() for connection in found]
            self._idle.clear()
        for connection in idle:
            connection.close()

    def _take(self, servers: Sequence[Candidate]) -> Connection:
        """Return a connection to the first of `servers` that can be reached. Raises ConnectionFailed."""
        with self._lock:
            for server, node in servers:
                for connection in self._idle.get(server, ()):
                    if node in ("", connection.handshake.node):
                        self._idle[server].remove(connection)
                        return connection
        failures = []
        for server, node in servers:
            try:
                connection = Connection(server, self._settings)
            except ConnectionFailed as failure:
                failures.append(str(failure))
                continue
            # Nodes name all their addresses, such as 127.0.0.1, at which this host may run another cluster.
            if node in ("", connection.handshake.node):
                return connection
            failures.append(f"{connection.name} is another node")
            connection.close()
        raise ConnectionFailed("; ".join(failures))

    def _give(self, connection: Connection) -> None:
        with self._lock:
            if not self._closed:
                self._idle.setdefault(connection.server, []).append(connection)
                return
        connection.close()

    def _run(self, servers: Sequence[Candidate], use: Callable[[Connection], Result]) -> Result:
        """Return what `use` makes of a connection to one of `servers`. An idle one may have died."""
        while True:
            connection = self._take(servers)
            try:
                result = use(connection)
            except ServerFailure:
                if connection.is_idle:
                    self._give(connection)
                else:
                    connection.close()
                raise
            except ConnectionFailed:
                connection.close()
                with self._lock:
                    stale = self._idle.pop(connection.server, [])
                for other in stale:
                    other.close()
                if not stale:
                    raise
            except BaseException:
                connection.close()
                raise
            else:
                self._give(connection)
                return result

    def _ask(self, operation: int, contents: bytes, decode: Callable[[memoryview], Result]) -> Result:
        """Return the decoded response of any server. Raises SourceError."""

        def use(connection: Connection) -> Result:
            try:
                return decode(connection.request(operation, contents))
            except (Malformed, TooLarge) as error:
                raise ConnectionFailed(f"{connection.name} sent a damaged message: {error}") from None

        return self._retry(lambda: self._run(self._known_servers(), use), "The cluster")

    def _retry(self, attempt: Callable[[], Result], what: str) -> Result:
        """Return what `attempt` gives, also where it fails at first. Raises SourceError."""
        deadline = time.monotonic() + _FAILOVER * self._settings.timeout
        number, logged = 0, ""
        while True:
            try:
                return attempt()
            except ServerFailure as failure:
                raise_final(failure, self.address.cache)
                reason, advice = " ".join(failure.message.split())[:300], "Look at the servers' logs"
            except ConnectionFailed as failure:
                reason, advice = (
                    str(failure),
                    "Look whether the servers run and listen for thin clients there",
                )
            # Without any answer so far, the address is wrong more likely than a server has died.
            if self._layout is None or time.monotonic() > deadline:
                raise SourceError(f"{what} must answer, at {self.address}. Received: {reason}. {advice}")
            if reason != logged:
                logger.warning("%s is asked again: %s", what, reason)
                logged = reason
            time.sleep(_PAUSES[min(number, len(_PAUSES) - 1)])
            number += 1

    def _known_servers(self) -> list[Candidate]:
        """Return the servers of the address, and those that the cluster has named."""
        layout = self._layout
        found: list[Candidate] = [(server, "") for server in self.address.servers]
        for endpoint in layout.endpoints.values() if layout else ():
            found += [(s, node) for s, node in self._servers_of(endpoint) if (s, "") not in found]
        return found

    def _servers_of(self, endpoint: Endpoint) -> list[Candidate]:
        """Return where a node may be reached, first the ways that the user has named."""
        servers = dict.fromkeys((host, endpoint.port) for host in endpoint.hosts if "%" not in host)
        named = {host for host, _ in self.address.servers}
        ordered = sorted(servers, key=lambda s: (s not in self.address.servers, s[0] not in named))
        return [(server, endpoint.node) for server in ordered]

    def find_cache(self) -> CacheConfiguration:
        """Return the configuration of the cache. Raises SourceError, which names similar caches."""
        names = self._ask(GET_NAMES, b"", decode_names)
        wanted = self.address.cache
        schema, _, table = wanted.rpartition(".")
        sql = f"SQL_{schema or 'PUBLIC'}_{table}"
        found = next((n for n in names if n == wanted), None) or next((n for n in names if n == sql), None)
        found = found or next((n for n in names if n == sql.upper()), None)
        if found is None:
            raise SourceError(
                f"Cache {wanted} must exist in Ignite; a SQL table is named by SCHEMA.TABLE. Received: "
                f"{name_list(names, wanted)} at {self.address}"
            )
        self.address = replace(self.address, cache=found)
        self._cache = hash_name(found)
        configuration = self._ask(GET_CONFIGURATION, encode_cache(self._cache), decode_configuration)
        if configuration.name != found:
            raise SourceError(
                f"The server's configuration of cache {found} must be in the form of Ignite 2.11 to 2.18. "
                f"Received: one of {configuration.name!r}"
            )
        return configuration

    def make_cache(self) -> CacheConfiguration:
        """Make the cache unless it is there, by the template of its name if there is one. Returns its
        configuration. Raises SourceError."""
        try:
            return self.find_cache()
        except SourceError:
            self._ask(GET_OR_CREATE, pack_string(self.address.cache), lambda contents: None)
            return self.find_cache()

    def put_type(self, kind: BinaryType) -> None:
        """Make a class known to the cluster."""
        self._ask(PUT_TYPE, encode_put_type(kind), lambda contents: None)

    def put_rows(self, rows: int, data: bytes) -> None:
        """Put rows, keys and values in turn, over those that are there. They are there when it returns.

        Where a server fails, another one is given all of them again.
        """
        self._ask(STREAM, encode_stream(self._cache, rows, data), lambda contents: None)

    def count_rows(self) -> int:
        """Return how many rows the cache has now."""
        return self._ask(GET_SIZE, encode_size(self._cache), decode_size)

    def find_type(self, number: int) -> BinaryType:
        """Return what the cluster knows of a class."""
        found = self._ask(GET_TYPE, encode_type(number), decode_type)
        return found or BinaryType(number, f"class {number}, which the cluster doesn't know")

    def find_layout(self) -> Layout:
        """Return where the partitions are now."""
        return self._retry(self._ask_layout, "The map of partitions")

    def _ask_layout(self) -> Layout:
        """Return where the partitions are now. Raises ConnectionFailed and ServerFailure."""
        cache = self._cache

        def use(connection: Connection) -> Layout:
            try:
                found = decode_partitions(connection.request(GET_PARTITIONS, encode_partitions(cache)), cache)
                endpoints = []
                if connection.handshake.has_feature(ENDPOINTS_FEATURE):
                    endpoints = decode_endpoints(connection.request(GET_ENDPOINTS, encode_endpoints()))
            except (Malformed, TooLarge) as error:
                raise ConnectionFailed(f"{connection.name} sent a damaged message: {error}") from None
            return Layout(found.topology, found.nodes, {endpoint.node: endpoint for endpoint in endpoints})

        found = self._run(self._known_servers(), use)
        with self._lock:
            if self._layout is None or self._layout.topology != found.topology:
                self._unreachable.clear()
            self._layout = found
        return found

    def scan(self, partitions: Sequence[int], page_rows: int) -> list[ScannedPartition]:
        """Return all rows of each partition (-1: of the cache). Several of one node are asked for at once."""
        found: dict[int, ScannedPartition] = {}
        layout = self._layout
        nodes: dict[str, list[int]] = {}
        for partition in partitions if layout and layout.primaries else ():
            nodes.setdefault(layout.primaries[partition] if layout else "", []).append(partition)
        for node, numbers in nodes.items():
            endpoint = layout.endpoints.get(node) if layout else None
            if endpoint is None or len(numbers) == 1 or node in self._unreachable:
                continue
            # What fails is read again below.
            with contextlib.suppress(ConnectionFailed, ServerFailure, TooLarge):
                use = partial(self._scan_all, partitions=numbers, page_rows=page_rows, found=found)
                self._run(self._servers_of(endpoint), use)
        return [found[p] if p in found else self._scan_partition(p, page_rows) for p in partitions]

    def _scan_all(
        self,
        connection: Connection,
        partitions: Sequence[int],
        page_rows: int,
        found: dict[int, ScannedPartition],
    ) -> None:
        """Read partitions by one connection into `found`. The next ones are asked for while one is read."""

        def ask(partition: int) -> tuple[int, int]:
            return partition, connection.send(SCAN, encode_scan(self._cache, page_rows, partition))

        waiting = deque(map(ask, partitions[:_SCANS_AHEAD]))
        for number in range(len(partitions)):
            partition, request = waiting.popleft()
            pages = self._pages(connection, request)
            found[partition] = ScannedPartition(tuple(pages), connection.handshake.node)
            waiting.extend(map(ask, partitions[number + _SCANS_AHEAD : number + _SCANS_AHEAD + 1]))

    def _scan_partition(self, partition: int, page_rows: int) -> ScannedPartition:
        """Return all rows of a partition (-1: of the cache), from its primary node if that can be reached.

        Where a server fails, what it has sent is dropped, and the next primary node is asked for all of it.
        """
        rows = page_rows

        def attempt() -> ScannedPartition:
            nonlocal rows
            try:
                return self._scan_once(partition, rows)
            except TooLarge as error:
                if rows == 1:
                    raise SourceError(
                        f"A row must be smaller than 256 MiB. Received: {error.size} bytes in partition "
                        f"{partition} of cache {self.address.cache}. Leave such rows out of the cache"
                    ) from None
                rows = max(1, rows // _FEWER_ROWS)
                raise ConnectionFailed(f"a page of {error.size} bytes is too large") from None
            except (ConnectionFailed, ServerFailure):
                # Once: how long a partition is tried is one deadline.
                if self._layout is not None:
                    with contextlib.suppress(ConnectionFailed, ServerFailure):
                        self._ask_layout()
                raise

        return self._retry(attempt, f"Partition {partition} of cache {self.address.cache}")

    def _scan_once(self, partition: int, page_rows: int) -> ScannedPartition:
        layout = self._layout
        node = layout.primaries[partition] if layout and 0 <= partition < len(layout.primaries) else ""
        endpoint = layout.endpoints.get(node) if layout else None

        def use(connection: Connection) -> ScannedPartition:
            pages = self._pages(
                connection, connection.send(SCAN, encode_scan(self._cache, page_rows, partition))
            )
            return ScannedPartition(tuple(pages), connection.handshake.node)

        if endpoint is not None and node not in self._unreachable:
            try:
                return self._run(self._servers_of(endpoint), use)
            except ConnectionFailed as failure:
                # Read from another server next, unless a new layout has another primary node by then.
                self._unreachable.add(node)
                logger.warning("Node %s: %s", node, failure)
                raise
        return self._run(self._known_servers(), use)

    def _pages(self, connection: Connection, request: int) -> list[Page]:
        """Return all pages of a scan that was asked for. The next one is on its way while one is taken in."""
        pages: list[Page] = []
        cursor: int | None = None
        size = empty = 0
        while True:
            contents = connection.receive(request)
            try:
                page = decode_page(contents, cursor)
            except Malformed as error:
                raise ConnectionFailed(f"{connection.name} sent a damaged page: {error}") from None
            if page.rows:
                pages.append(page)
            size += len(page.data)
            empty = 0 if page.rows else empty + 1
            if page.more and empty == _MOST_EMPTY_PAGES:
                raise ConnectionFailed(f"{connection.name} sent {empty} pages without rows and promised more")
            if size > _MOST_PARTITION_BYTES:
                raise SourceError(
                    f"A partition of a cache in Ignite must fit into memory {COPIES_IN_MEMORY} times, to be "
                    f"put into the order of its keys. Received: {size} bytes from {connection.name}, and "
                    f"{'more follow' if page.more else 'no more'}. Give the cache more partitions; of a "
                    f"replicated cache, read a partitioned copy"
                )
            cursor = page.cursor
            if not page.more:
                return pages
            request = connection.send(NEXT_PAGE, encode_cursor(cursor))

    def sample(self, partition: int, page_rows: int) -> Page:
        """Return the first rows of a partition (-1: of the cache)."""

        def use(connection: Connection) -> Page:
            contents = connection.request(SCAN, encode_scan(self._cache, page_rows, partition))
            try:
                page = decode_page(contents, None)
            except Malformed as error:
                raise ConnectionFailed(f"{connection.name} sent a damaged page: {error}") from None
            if page.more:
                connection.request(CLOSE, encode_cursor(page.cursor))
            return page

        try:
            return self._retry(lambda: self._run(self._known_servers(), use), "The cluster")
        except TooLarge as error:
            if page_rows == 1:
                raise SourceError(
                    f"A row must be smaller than 256 MiB. Received: {error.size} bytes in cache "
                    f"{self.address.cache}. Leave such rows out of the cache"
                ) from None
            return self.sample(partition, 1)
