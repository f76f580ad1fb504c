"""A cache of Ignite as a Source: its rows by partition, those of a partition in the order of their keys.

The partition of a key doesn't depend on how many nodes there are. So equal rows come in an equal order from
any cluster whose cache has as many partitions.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import xxhash

from insitu.base.errors import InputError, SourceError
from insitu.base.spec import Column, NodeId
from insitu.base.wording import format_count
from insitu.extensions.ignite.address import Address, ConnectionSettings
from insitu.extensions.ignite.arrow_values import unpack_arrow
from insitu.extensions.ignite.cluster import COPIES_IN_MEMORY, Cluster, Layout
from insitu.extensions.ignite.fields import RowFields, decode_rows, find_fields
from insitu.extensions.ignite.objects import UnknownSchema, gather_codes
from insitu.extensions.ignite.protocol import BinaryType, CacheConfiguration, Page
from insitu.extensions.ignite.rows import Positions, Rows, find_rows
from insitu.extensions.ignite.values import NUMBERS, Leaf, decode_leaf
from insitu.extensions.ignite.ways import find_way
from insitu.extensions.ignite.wire import STRING
from insitu.grid.layout import Endpoint, HostPlaces
from insitu.grid.partitions import TEXT, text_buffers
from insitu.grid.sources import Block, ColumnOptions, ReadAccount, SourceOptions, map_ordered, raw_bytes

PAGE_BYTES = 1 << 20
"""About how many bytes a server sends at once."""
_MOST_PAGE_ROWS = 1 << 14
_SAMPLE_ROWS, _SAMPLE_PARTITIONS, _SAMPLE_BYTES = 256, 32, 16 << 20
"""Rows, partitions that have rows, and about the bytes at most, that tell which columns there are."""
_WIDER = 16
"""How many times more rows and partitions are looked at where these leave a question open."""
_LEAST_GROUPS = 8
"""Into how many groups partitions are divided at least, where there are as many."""
_MOST_REFRESHES = 1000
"""How often classes are asked for again because of new schemas, before the server isn't believed any more."""
WHOLE_CACHE = -1
"""The partition number by which all rows are read at once."""


class TypeBook:
    """The classes that a cluster knows, each asked for once. Several threads may use it."""

    def __init__(self, cluster: Cluster, known: Mapping[int, BinaryType] | None = None) -> None:
        self._cluster, self._lock = cluster, threading.Lock()
        self.known = dict(known or {})
        #: How often a class was asked for again. Written by `refresh`.
        self._refreshes = 0

    def find(self, number: int) -> BinaryType:
        with self._lock:
            if number not in self.known:
                self.known[number] = self._cluster.find_type(number)
            return self.known[number]

    def refresh(self, number: int, *, may_grow: bool = False) -> None:
        """Ask for a class again, of which objects of a new schema have come.

        Raises SourceError if it has no such schema, and, unless it `may_grow`, where it has new fields.
        """
        with self._lock:
            self._refreshes += 1
            if self._refreshes > _MOST_REFRESHES:
                raise SourceError(
                    f"The classes of a cache must keep their schemas while it is read. Received: objects of "
                    f"new schemas {_MOST_REFRESHES} times. Import again when no program writes new ones"
                )
            before, after = self.known[number], self._cluster.find_type(number)
            added = {part.name for part in after.fields} - {part.name for part in before.fields}
            if (added and not may_grow) or after.schemas.keys() == before.schemas.keys():
                raise SourceError(
                    f"The fields of {before.name} must stay as they are while its objects are read. "
                    f"Received: objects of a new schema{f' with {min(added)}' if added else ''}. Import "
                    f"again when no program adds fields any more"
                )
            self.known[number] = after


@dataclass(frozen=True, slots=True)
class _Part:
    """The rows of some partitions that follow each other, in order."""

    #: Values by column.
    columns: Mapping[str, Any]
    #: How many rows.
    rows: int
    #: Their bytes, as Ignite sent them.
    bytes: int
    #: Of these, those that count as remote, such as from a server that wasn't primary at the beginning.
    remote_bytes: int
    #: The partition of each row.
    partitions: Positions
    #: (partition, rows in Ignite, digest) of each partition that has rows.
    digests: list[tuple[int, int, str]] = field(default_factory=list)


_EMPTY = _Part({}, 0, 0, 0, np.zeros(0, np.int64))


class IgniteSource:
    """All rows of a cache. What they are is found when it is made; nothing is kept open.

    Raises SourceError, when it is made or while it is read, where rows can't be had or can't be columns.
    """

    format: ClassVar[str] = "ignite"
    suffixes: ClassVar[tuple[str, ...]] = ()

    def __init__(
        self,
        address: Address,
        settings: ConnectionSettings,
        options: ColumnOptions,
        reading: SourceOptions,
        *,
        partly: bool = False,
    ) -> None:
        """With `partly` columns are left out that can't be imported: `fields.problems` names them."""
        self._settings = settings
        #: What was said of the columns, as the command line takes it.
        self.options = options.to_json() | {"ragged": sorted(reading.ragged_columns)}
        self.origin: dict[str, Any] | None = None
        """What was read, after all blocks were: when, which topology version, a digest of each partition."""
        with Cluster(address, settings) as cluster:
            self.configuration: CacheConfiguration = cluster.find_cache()
            #: By which it is read, with the full name of the cache.
            self.address = cluster.address
            self.path = str(self.address)
            # Before rows are counted: a server that leaves in between is missed at the end, too.
            self.layout = cluster.find_layout()
            self.ignite_rows = cluster.count_rows()
            if not self.ignite_rows:
                raise SourceError(f"{self.path} has no rows. Load the cache first")
            types = TypeBook(cluster)
            rows = self._sample(cluster, 1)
            # What is null in all of a few rows, or a list without elements, may be a column by more of them.
            # If there are objects of several classes, there may be more of these.
            seen = self._find_fields(rows, types, options, reading, partly=True)
            if seen.problems or seen.mixed:
                rows = self._sample(cluster, _WIDER)
            self.fields = self._find_fields(rows, types, options, reading, partly=partly)
            self._types = types.known
        #: Facts that the user should know of the columns.
        self.notes = tuple(
            f"{name} is of {' and of '.join(classes)}: columns are those of all, null where a class has none"
            for name, classes in self.fields.mixed
        )
        self.row_bytes = len(rows.data) / len(rows.keys)
        self.columns = self.fields.columns
        self.expected_rows = int(self.ignite_rows * self._arrow_rows(rows))

    def _sample(self, cluster: Cluster, times: int) -> Rows:
        """Return some rows of the first partitions that have any, `times` as many as are enough mostly."""
        pages = _sample(cluster, self.partitions, times)
        with self._malformed_as_error():
            return find_rows(b"".join(page.data for page in pages), sum(page.rows for page in pages))

    def _find_fields(
        self, rows: Rows, types: TypeBook, options: ColumnOptions, reading: SourceOptions, *, partly: bool
    ) -> RowFields:
        while True:
            try:
                with self._malformed_as_error():
                    return find_fields(rows, self.configuration, types.find, options, reading, partly=partly)
            except UnknownSchema as unknown:
                types.refresh(unknown.number, may_grow=True)

    @property
    def partitions(self) -> Sequence[int]:
        """The partitions of the cache in Ignite; WHOLE_CACHE alone where its servers don't say them."""
        return range(len(self.layout.primaries)) if self.layout.primaries else [WHOLE_CACHE]

    @property
    def primaries(self) -> tuple[str, ...]:
        """The server that was primary for each partition at first; empty where it isn't known."""
        return self.layout.primaries

    @property
    def endpoints(self) -> Mapping[str, Endpoint]:
        """All servers at first, by UUID."""
        return self.layout.endpoints

    def find_way(self, node: NodeId, places: HostPlaces) -> str:
        """Return the address by which a node reads the cache. Raises SourceError."""
        return find_way(self.address, self.endpoints, node, places)

    @property
    def expected_bytes(self) -> int:
        """About how many bytes Ignite will send."""
        return int(self.ignite_rows * self.row_bytes)

    def _arrow_rows(self, rows: Rows) -> float:
        """Return how many rows of the cache a row of Ignite makes, by the sample."""
        arrow = [leaf for leaf in self.fields.leaves if leaf.arrow]
        if len(arrow) > 1:
            raise InputError(
                f"--arrow can name one column: its rows become those of the cache. Received: "
                f"{' and '.join(leaf.name for leaf in arrow)}. Leave the others out with --without"
            )
        if not arrow:
            return 1.0
        values = decode_rows(self.fields, rows, self._types.__getitem__)
        counts, _ = unpack_arrow(values[arrow[0].name], arrow[0].arrow, arrow[0].name)
        return float(counts.mean())

    @contextlib.contextmanager
    def _malformed_as_error(self) -> Iterator[None]:
        try:
            yield
        except (ValueError, LookupError, ArithmeticError) as error:
            raise SourceError(
                f"The rows of {self.path} must be in Ignite's binary format. Received: other bytes "
                f"({error}). Look at the server's log, and at its version: 2.11 to 2.18 are known"
            ) from error

    def blocks(self, block_bytes: int, start: int = 0) -> Iterator[Block]:
        if start:
            raise InputError("Rows of Ignite are read from the first one. Received: a place in their middle")
        self.origin = None
        began = time.time()
        with Cluster(self.address, self._settings) as cluster:
            before, account = self._find_layout(cluster), ReadAccount()
            yield from self._read(cluster, self.partitions, block_bytes, account)
            self._record_origin(before, cluster.find_layout(), began, account)

    @contextlib.contextmanager
    def read_elsewhere(self) -> Iterator[ReadAccount]:
        """Yield an account that the caller fills with what others read of all partitions (`blocks_of`).

        Makes `origin` at the end. Raises SourceError if rows are missing.
        """
        self.origin = None
        began = time.time()
        with Cluster(self.address, self._settings) as cluster:
            before, account = self._find_layout(cluster), ReadAccount()
            yield account
            self._record_origin(before, cluster.find_layout(), began, account)

    def blocks_of(
        self, partitions: Sequence[int], block_bytes: int, account: ReadAccount, near: Collection[str]
    ) -> Iterator[Block]:
        """Yield the rows of some partitions, and fill `account`. Raises SourceError.

        Bytes are local that come from the primary node of their partition, if that is one of `near`.
        """
        with Cluster(self.address, self._settings) as cluster:
            self._find_layout(cluster)
            yield from self._read(cluster, partitions, block_bytes, account, near)

    def _find_layout(self, cluster: Cluster) -> Layout:
        layout = cluster.find_layout()
        if len(layout.primaries) != len(self.layout.primaries):
            raise SourceError(
                f"{self.path} must keep its partitions while it is read. Received: "
                f"{len(self.layout.primaries)} and then {len(layout.primaries)}"
            )
        return layout

    def _read(
        self,
        cluster: Cluster,
        partitions: Sequence[int],
        block_bytes: int,
        account: ReadAccount,
        near: Collection[str] | None = None,
    ) -> Iterator[Block]:
        reader = _PartitionReader(self, cluster, TypeBook(cluster, self._types), near)
        done = sent = 0
        groups = self._groups(partitions, block_bytes)
        with contextlib.closing(map_ordered(reader.read, groups)) as parts:
            for part in parts:
                account.digests += part.digests
                account.remote_bytes += part.remote_bytes
                account.local_bytes += part.bytes - part.remote_bytes
                sent += part.bytes
                pieces = max(1, part.bytes // block_bytes)
                digests = {partition: digest for partition, _, digest in part.digests}
                for rows in np.array_split(np.arange(part.rows), pieces):
                    if len(rows):
                        done += len(rows)
                        cut = slice(int(rows[0]), int(rows[-1]) + 1)
                        columns, at = _cut(part.columns, cut), part.partitions[cut]
                        read = min(sent, self.expected_bytes)
                        yield Block(columns, len(rows), read, done, at, digests=digests)

    def _groups(self, partitions: Sequence[int], block_bytes: int) -> Iterator[Sequence[int]]:
        """Yield partitions that follow each other, of about `block_bytes` together."""
        each = self.expected_bytes / len(self.partitions)
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        if each * COPIES_IN_MEMORY > memory:
            raise SourceError(
                f"A partition of a cache in Ignite must fit into memory {COPIES_IN_MEMORY} times, to be put "
                f"into the order of its keys. Received: {self.path} with about {int(each)} bytes a "
                f"partition. Give the cache more partitions; of a replicated cache, read a partitioned copy"
            )
        # Few rows are read by several threads, too.
        count = max(1, min(int(block_bytes / max(1.0, each)), len(partitions) // _LEAST_GROUPS))
        for first in range(0, len(partitions), count):
            yield partitions[first : first + count]

    def _record_origin(self, before: Layout, after: Layout, began: float, account: ReadAccount) -> None:
        account.digests.sort()
        self._check_loss(before, after, sum(rows for _, rows, _ in account.digests))
        self.origin = self._describe_origin(before, after, began, account.digests)
        self.origin |= {"local_bytes": account.local_bytes, "remote_bytes": account.remote_bytes}
        if account.nodes:
            self.origin["nodes"] = dict(account.nodes)

    def _check_loss(self, before: Layout, after: Layout, rows: int) -> None:
        """Raise SourceError if rows are missing after a server has left since they were counted, or after
        partitions have moved that all servers together were asked for."""
        if not after.primaries and before.topology != after.topology and rows < self.ignite_rows:
            raise SourceError(
                f"All rows that {self.path} had must be read. Received: {rows} of {self.ignite_rows}, while "
                f"partitions moved that Ignite doesn't name, or rows were removed meanwhile. Nothing was "
                f"imported. Import again when no server comes or goes"
            )
        lost = set(self.layout.endpoints) - set(after.endpoints)
        if lost and rows < self.ignite_rows:
            raise SourceError(
                f"All rows that {self.path} had must be read. Received: {rows} of {self.ignite_rows} after "
                f"{format_count(len(lost), 'server')} left, with partitions of which Ignite has no other "
                "copy, or rows "
                f"were removed meanwhile. Nothing was imported. Import again what is there now, or give the "
                f"cache backups"
            )

    def _describe_origin(
        self, before: Layout, after: Layout, began: float, digests: Sequence[tuple[int, int, str]]
    ) -> dict[str, Any]:
        whole = xxhash.xxh3_128()
        for partition, rows, digest in digests:
            whole.update(f"{partition} {rows} {digest}\n".encode())
        return {
            "kind": self.format,
            "address": self.path,
            "topology": [list(before.topology), list(after.topology)],
            "read": [began, time.time()],
            "rows": sum(rows for _, rows, _ in digests),
            "digest": whole.hexdigest(),
            "partitions": [list(entry) for entry in digests],
            "options": dict(self.options),
        }


class _PartitionReader:
    """Reads partitions into columns. Several threads may use it."""

    def __init__(
        self, source: IgniteSource, cluster: Cluster, types: TypeBook, near: Collection[str] | None
    ) -> None:
        """`near` are the nodes of Ignite whose bytes are local; None: all are."""
        self._source, self._cluster, self._types = source, cluster, types
        self._near = near
        self._page_rows = rows_of_page(source.row_bytes)

    def read(self, partitions: Sequence[int]) -> _Part:
        """Return all rows of these partitions in order."""
        numbers, counts, pages, remote = [], [], [], 0
        found = self._cluster.scan(partitions, self._page_rows)
        for partition, scanned in zip(partitions, found, strict=True):
            if scanned.rows:
                numbers.append(partition)
                counts.append(scanned.rows)
                pages += [page.data for page in scanned.pages]
                remote += scanned.bytes if self._is_remote(partition, scanned.node) else 0
        if not numbers:
            return _EMPTY
        data = pages[0] if len(pages) == 1 else b"".join(pages)
        pages.clear()
        found.clear()
        with self._source._malformed_as_error():
            rows = find_rows(data, sum(counts))
            values = self._decode(rows)
            order = order_rows(rows, np.repeat(np.array(numbers), counts))
            repeated = count_repeated(rows, order) if numbers == [WHOLE_CACHE] else 0
        if repeated:
            raise SourceError(
                f"All servers together must send each row once. Received: {repeated} rows of "
                f"{self._source.path} twice, while partitions moved. Import again when servers stay"
            )
        return self._arrange(values, order, numbers, counts, (len(data), remote))

    def _is_remote(self, partition: int, node: str) -> bool:
        primaries = self._source.layout.primaries
        is_far = self._near is not None and node not in self._near
        return bool(primaries) and (is_far or node != primaries[partition])

    def _decode(self, rows: Rows) -> dict[str, Any]:
        while True:
            try:
                return decode_rows(self._source.fields, rows, self._types.find)
            except UnknownSchema as unknown:
                self._types.refresh(unknown.number)

    def _arrange(
        self,
        values: dict[str, Any],
        order: Positions,
        numbers: list[int],
        counts: list[int],
        sizes: tuple[int, int],
    ) -> _Part:
        """Return the rows in order, those of Arrow data one by one. `sizes` are all bytes and remote ones."""
        found = {name: take_rows(column, order) for name, column in values.items()}
        bounds = np.concatenate(([0], np.cumsum(counts)))
        for leaf in self._source.fields.leaves:
            if leaf.arrow:
                repeats, columns = unpack_arrow(found.pop(leaf.name), leaf.arrow, leaf.name)
                spread = np.repeat(np.arange(len(repeats)), repeats)
                found = {name: take_rows(column, spread) for name, column in found.items()} | columns
                bounds = np.concatenate(([0], np.cumsum(repeats)))[bounds]
        rows = int(bounds[-1])
        names = [column.name for column in self._source.columns]
        if not rows:
            return replace(_EMPTY, bytes=sizes[0], remote_bytes=sizes[1])
        digests = digest_rows(names, found, bounds)
        return _Part(
            {name: found[name] for name in names},
            rows,
            *sizes,
            np.repeat(np.array(numbers), np.diff(bounds)),
            list(zip(numbers, counts, digests, strict=True)),
        )


def _cut(columns: Mapping[str, Any], rows: slice) -> dict[str, Any]:
    return {
        name: values[rows]
        if isinstance(values, np.ndarray)
        else values.slice(rows.start, rows.stop - rows.start)
        for name, values in columns.items()
    }


def rows_of_page(row_bytes: float) -> int:
    """Return how many rows a page has."""
    return max(1, min(_MOST_PAGE_ROWS, int(PAGE_BYTES / row_bytes)))


def _sample(cluster: Cluster, partitions: Sequence[int], times: int) -> list[Page]:
    """Return some rows of the first partitions that have any. Raises SourceError if none has.

    `times` says how many times more rows and partitions than are enough mostly.
    """
    pages: list[Page] = []
    size = 1
    for partition in partitions:
        page = cluster.sample(partition, size)
        if page.rows and size == 1:
            size = min(_SAMPLE_ROWS, rows_of_page(len(page.data)))
            page = cluster.sample(partition, size)
        pages += [page] if page.rows else []
        rows, size_so_far = sum(page.rows for page in pages), sum(len(page.data) for page in pages)
        if rows >= times * _SAMPLE_ROWS or len(pages) == times * _SAMPLE_PARTITIONS:
            break
        if size_so_far >= _SAMPLE_BYTES:
            break
    if not pages:
        raise SourceError(f"{cluster.address} has no rows that can be read. Load the cache first")
    return pages


# Pure: rows in the order of their partitions and keys, and a digest that is equal for equal rows


def order_rows(rows: Rows, partitions: Positions) -> Positions:
    """Return the rows ordered by partition, then by key: numbers by size, others by their bytes.

    `partitions` is that of each row, ascending. The order depends on partitions and keys alone: a cache
    has each key once.
    """
    keys = _comparable_keys(rows)
    if isinstance(keys, np.ndarray):
        # 0.0 and -0.0 are two keys, and so are NaNs of different bits.
        bits = (keys.view(f"i{keys.itemsize}"),) if keys.dtype.kind == "f" else ()
        order: Positions = np.lexsort((*bits, keys, partitions))
        return order
    both = pa.table({"partition": partitions, "key": keys})
    sorted_rows = pc.sort_indices(both, sort_keys=[("partition", "ascending"), ("key", "ascending")])
    order = sorted_rows.to_numpy().astype(np.int64)
    return order


def count_repeated(rows: Rows, order: Positions) -> int:
    """Return how many rows have the key of the row before them. `order` is that of their keys."""
    keys = take_rows(_comparable_keys(rows), order)
    if isinstance(keys, np.ndarray):
        bits = keys.view(f"u{keys.itemsize}")
        return int((bits[1:] == bits[:-1]).sum())
    return pc.sum(pc.equal(keys[1:], keys[:-1])).as_py() or 0


def _comparable_keys(rows: Rows) -> Any:
    codes = gather_codes(rows.data, rows.keys)
    if len(codes) and (codes == codes[0]).all():
        code = int(codes[0])
        if code in NUMBERS:
            return decode_leaf(rows.data, rows.keys, Leaf("key", code, Column("key", NUMBERS[code])))
        if code == STRING:
            texts = decode_leaf(rows.data, rows.keys, Leaf("key", code, Column("key", TEXT)))
            return texts.cast(pa.large_binary())
    ends = np.empty(2 * len(rows.keys), np.int64)
    ends[::2], ends[1::2] = rows.keys, rows.values
    # Keys and values in turn: every other binary is a key.
    turns = pa.Array.from_buffers(
        pa.large_binary(), max(0, len(ends) - 1), [None, pa.py_buffer(ends), pa.py_buffer(rows.data)]
    )
    return turns.take(pa.array(np.arange(0, len(ends), 2)))


def take_rows(values: Any, order: Positions) -> Any:
    """Return the values of these rows, in this order."""
    if isinstance(values, np.ndarray):
        return values[order]
    return values.take(pa.array(order))


def digest_rows(columns: Sequence[str], values: Mapping[str, Any], bounds: Positions) -> list[str]:
    """Return a digest of the rows [bounds[i], bounds[i + 1]) for each i, in hex: equal for equal rows."""
    digests = [xxhash.xxh3_128() for _ in bounds[1:]]
    for name in columns:
        column = values[name]
        for digest, start, stop in zip(digests, bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
            if isinstance(column, np.ndarray):
                digest.update(raw_bytes(np.ascontiguousarray(column[start:stop])))
            else:
                offsets, data = text_buffers(column.slice(start, stop - start))
                digest.update(raw_bytes(np.diff(offsets)))
                digest.update(raw_bytes(data[offsets[0] : offsets[-1]]))
    return [digest.hexdigest() for digest in digests]
