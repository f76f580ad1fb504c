"""A worker's requests for the rows of tables."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from insitu.base.errors import InputError
from insitu.parameters import native
from insitu.parameters.futures import Future, gather
from insitu.parameters.rules import Array, Message, as_dtype, assign_servers
from insitu.parameters.server_connection import ROWS_LANE, ServerConnection
from insitu.parameters.server_requests import ServerRequests
from insitu.parameters.tables import Table, sum_duplicates
from insitu.parameters.worker_buffers import Allocation, Arena, Spec

Pair = tuple[Array, Array]
"""Keys and rows."""


class TableClient:
    """Looks up and updates rows of tables. Keys are split over the servers by hash."""

    def __init__(
        self,
        requests: ServerRequests,
        shards: tuple[int, ...],
        make_version_meta: Callable[[], Mapping[str, Any]],
    ) -> None:
        """`make_version_meta` returns the fields of a pull that name the version that a server must have."""
        self._requests = requests
        self._connections = requests.connections
        self._make_version_meta = make_version_meta
        self._shards = shards
        #: Version of each server when it last sent rows.
        self.row_versions = [0] * len(self._connections)
        self._tables: dict[str, Table] = {}
        self._arena: Arena | None = None

    # Definition

    def define_tables(self, tables: Sequence[Table]) -> None:
        """Define sparse tables, alike in all workers. Raises DefinitionMismatch, InputError."""
        self._attach_arena()
        for table in tables:
            if self._tables.get(table.name) == table:
                continue
            meta = {"table": table.to_json()}
            self._requests.request_all("define_table", meta, lane=ROWS_LANE).result()
            self._requests.remember_definition("define_table", meta)
            self._tables[table.name] = table

    def _attach_arena(self) -> None:
        """Create the arena and have the servers of this host map it, if there are any."""
        if self._arena is None and any(connection.shares_memory for connection in self._connections):
            self._arena = Arena()
            self._requests.share(self._arena)

    def _allocate(self, server: ServerConnection, specs: Sequence[Spec]) -> Allocation | None:
        """Allocate memory that a server sees; None if it sees none or there is no room."""
        return self._arena.allocate(specs) if self._arena is not None and server.shares_memory else None

    # Rows

    def pull_rows(
        self, table: str, keys: Any, *, create: bool = True, out: Array | None = None
    ) -> Future[Array]:
        """Look up the rows of `keys`, int64[n], which may repeat. The result is [n, width].

        It is written to `out` if that is given; without it, and with one server, nothing is copied. A key
        without a row gets one, unless `create` is False: then its first values come and nothing is kept.
        """
        known, keys = self._get_table(table), _as_keys(keys)
        shape, dtype = (len(keys), known.width), as_dtype(known.dtype)
        if out is not None and (out.shape != shape or out.dtype != dtype):
            raise InputError(
                f"out must be {known.dtype}[{len(keys)}, {known.width}]. "
                f"Received: {out.dtype.name}{list(out.shape)}"
            )
        selections = self._select_keys(keys)
        futures, allocations = self._request_rows(known, keys, selections, create)

        def combine(answers: list[Message]) -> Array:
            self.row_versions = [answer.meta["version"] for answer in answers]
            if out is None and len(selections) == 1:
                only = allocations[0]
                return answers[0].arrays[0] if only is None or answers[0].arrays else only.detach(1)
            result = np.empty(shape, dtype) if out is None else out
            for index, answer, allocation in zip(selections, answers, allocations, strict=True):
                in_memory = allocation is not None and not answer.arrays
                rows = allocation.arrays[1] if allocation is not None and in_memory else answer.arrays[0]
                result[... if index is None else index] = rows
            return result

        return _free_when_done(gather(futures, self._requests.run_until_done, combine), allocations)

    def _request_rows(
        self, table: Table, keys: Array, selections: Sequence[Array | None], create: bool
    ) -> tuple[list[Future[Any]], list[Allocation | None]]:
        futures, dtype = [], as_dtype(table.dtype)
        allocations: list[Allocation | None] = []
        with self._requests.lock:
            for server, index in zip(self._connections, selections, strict=True):
                meta = {"table": table.name, "create": create, **self._make_version_meta()}
                own = _take(keys, index)
                allocation = self._allocate(
                    server, [(own.shape, own.dtype), ((len(own), table.width), dtype)]
                )
                allocations.append(allocation)
                if allocation is None:
                    futures.append(self._requests.request(server, "pull_rows", meta, [own], lane=ROWS_LANE))
                else:
                    allocation.arrays[0][...] = own
                    answer = self._requests.request(
                        server, "pull_rows", meta, allocation.arrays, ROWS_LANE, allocation.refs
                    )
                    futures.append(answer)
        return futures, allocations

    def push_rows(
        self, table: str, keys: Any, gradients: Any, sequence: int, *, shard: int | None = None, rows: int = 1
    ) -> Future[str]:
        """Update one table alone, at once whatever the mode. The result is "applied".

        `gradients`, [n, width], are for `keys`, int64[n]; those of equal keys are added up. `sequence` counts
        the shard's pushes to this table from 0, `rows` the rows of data.
        """
        self._get_table(table)
        split = self.split_by_server({table: (keys, gradients)})
        meta = {
            "table": table,
            "shard": resolve_shard(self._shards, shard),
            **as_counts(sequence=sequence, rows=rows),
        }

        def send(server: int) -> Future[Any]:
            connection, pair = self._connections[server], split[server][0]
            with self._requests.lock:
                allocation = self._allocate(connection, [(array.shape, array.dtype) for array in pair])
                if allocation is None:
                    return self._requests.request(connection, "push_rows", meta, pair, lane=ROWS_LANE)
                for target, array in zip(allocation.arrays, pair, strict=True):
                    target[...] = array
                future = self._requests.request(
                    connection, "push_rows", meta, allocation.arrays, ROWS_LANE, allocation.refs
                )
            return _free_when_done(future, [allocation])

        sends = [partial(send, server) for server in range(len(self._connections))]
        answers = self._requests.request_suspects_first(sends, self.find_nonfinite_rows(split))
        return gather([answers], self._requests.run_until_done, lambda _: "applied")

    def find_nonfinite_rows(self, split: Sequence[Sequence[Pair]]) -> list[int]:
        """Return the servers whose part of `split` isn't finite, if there are several."""
        if len(self._connections) == 1:
            return []
        return [
            server
            for server, pairs in enumerate(split)
            if not all(native.all_finite(rows) for _, rows in pairs)
        ]

    def read_rows(self, table: str, *, block: int = 1 << 16) -> Iterator[Pair]:
        """Yield all rows of a table as (int64[n] keys, [n, width] rows), server by server, unordered.

        Other workers should not push meanwhile: rows may be missed if some are evicted.
        """
        self._get_table(table)
        for connection in self._connections:
            start = 0
            while True:
                meta = {"table": table, "start": start, "stop": start + block}
                answer = self._requests.request(connection, "read_rows", meta, lane=ROWS_LANE).result()
                if not len(answer.arrays[0]):
                    break
                yield answer.arrays[0], answer.arrays[1]
                start += block

    def load_rows(self, table: str, keys: Any, rows: Any) -> Future[Any]:
        """Set the rows, [n, width], of distinct keys, int64[n]. New rows get fresh slots."""
        known = self._get_table(table)
        pairs = self.split_by_server(
            {table: (keys, np.asarray(rows, as_dtype(known.dtype)))}, merge_equal_keys=False
        )
        metas = [{"table": table, "names": ["keys", "values"]} for _ in self._connections]
        return self._requests.request_each(
            "load_rows", metas, [list(pair[0]) for pair in pairs], lane=ROWS_LANE
        )

    def _get_table(self, name: str) -> Table:
        if name not in self._tables:
            known = ", ".join(self._tables) or "none"
            raise InputError(
                f"A table must be defined (Client.define_tables) before it is used; this worker defined: "
                f"{known}. Received: {name!r}"
            )
        return self._tables[name]

    def _select_keys(self, keys: Array) -> list[Array | None]:
        """Return, for each server, the indices of the keys that it holds; None: all."""
        if len(self._connections) == 1:
            return [None]
        owners = assign_servers(keys, len(self._connections))
        return [np.flatnonzero(owners == connection.server) for connection in self._connections]

    def split_by_server(
        self, tables: Mapping[str, Pair | tuple[Any, Any]], merge_equal_keys: bool = True
    ) -> list[list[Pair]]:
        """Return, for each server and table, the keys that it holds and their rows.

        With `merge_equal_keys` the rows of equal keys are added up first. Raises InputError.
        """
        split: list[list[Pair]] = [[] for _ in self._connections]
        for name, (keys, gradients) in tables.items():
            known, keys = self._get_table(name), _as_keys(keys)
            rows = np.ascontiguousarray(gradients)
            if rows.shape != (len(keys), known.width) or rows.dtype.name != known.dtype:
                raise InputError(
                    f"Gradients of table {name!r} must be {known.dtype}[{len(keys)}, {known.width}], a row "
                    f"for each key. Received: {rows.dtype.name}{list(rows.shape)}"
                )
            if merge_equal_keys and len(keys) > 1 and not bool((keys[1:] > keys[:-1]).all()):
                keys, rows = sum_duplicates(keys, rows)
            for server, index in enumerate(self._select_keys(keys)):
                split[server].append((_take(keys, index), _take(rows, index)))
        return split


def resolve_shard(shards: tuple[int, ...], shard: int | None) -> int:
    """Return `shard`, or for None the only one of a worker's `shards`. Raises InputError for another
    worker's."""
    if shard is None and len(shards) == 1:
        return shards[0]
    if shard not in shards:
        raise InputError(f"shard must be one of this worker's, {shards}. Received: {shard}")
    return int(shard)


def as_counts(**given: Any) -> dict[str, int]:
    """Return each argument as an int. Raises InputError unless all are whole numbers."""
    try:
        return {name: operator.index(value) for name, value in given.items()}
    except TypeError:
        received = ", ".join(f"{name}={value!r}" for name, value in given.items())
        raise InputError(f"{' and '.join(given)} must be whole numbers. Received: {received}") from None


def _as_keys(keys: Any) -> Array:
    """Return `keys` as int64[n]. Raises InputError if they have no exact int64."""
    array = np.asarray(keys)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise InputError(f"Keys must be integers, [n]. Received: {array.dtype.name}{list(array.shape)}")
    if array.dtype == np.uint64 and array.size and int(array.max()) > np.iinfo(np.int64).max:
        raise InputError(f"A key must fit into int64. Received: {int(array.max())}")
    return np.ascontiguousarray(array, np.int64)


def _take(array: Array, index: Array | None) -> Array:
    return array if index is None else array[index]


def _free_when_done(future: Future[Any], allocations: Sequence[Allocation | None]) -> Future[Any]:
    def free(_: Future[Any]) -> None:
        for allocation in allocations:
            if allocation is not None:
                allocation.free()

    future.add_done_callback(free)
    return future
