"""A worker's requests for the rows of tables."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from insitu.errors import InputError
from insitu.parameters import native, sharding_plan
from insitu.parameters.arena import Allocation, Arena
from insitu.parameters.futures import Future, gathered
from insitu.parameters.hashing import server_of
from insitu.parameters.request_client import RequestClient
from insitu.parameters.server_connection import ROWS, ServerConnection
from insitu.parameters.tables import Table, summed
from insitu.parameters.wire import Array, Message


class TableClient(RequestClient):
    """Keys are split over the servers by hash; equal ones are added up before they're sent."""

    def __init__(
        self, links: Sequence[ServerConnection], shards: Sequence[int], timeout: float, stall_timeout: float
    ) -> None:
        super().__init__(links, timeout, stall_timeout)
        self.shards = tuple(shards)
        self._tables: dict[str, Table] = {}
        self._arena: Arena | None = None
        self.row_versions = [0] * len(self.links)
        """The version of each server when it last gave rows."""

    def told(self) -> dict[str, Any]:
        """What a server must know before it answers: see `Client`."""
        return {}

    def hosted(self, shard: int | None) -> int:
        """`shard`, which must be one of this worker's; None: its only one. Raises InputError."""
        if shard is None and len(self.shards) == 1:
            return self.shards[0]
        if shard not in self.shards:
            raise InputError(f"shard must be one of this worker's, {self.shards}. Received: {shard}")
        return int(shard)

    def define_tables(self, tables: Sequence[Table]) -> None:
        """Defines sparse tables, alike in all workers. Raises DefinitionMismatch, InputError."""
        self._share_arena()
        for table in tables:
            if self._tables.get(table.name) == table:
                continue
            meta = {"table": table.to_json()}
            self.everywhere("define_table", meta, lane=ROWS).result()
            self.remember("define_table", meta)
            self._tables[table.name] = table

    def _share_arena(self) -> None:
        near = [link for link in self.links if link.here]
        if self._arena is None and near:
            self._arena = Arena()
            futures = [self.request(link, "attach", self._arena.shown(), lane=ROWS) for link in near]
            gathered(futures, self.pump, list).result()

    def reintroduce(self, link: ServerConnection, deadline: float) -> None:
        super().reintroduce(link, deadline)
        if self._arena is not None and link.here:
            link.ask("attach", self._arena.shown(), deadline, lane=ROWS)
            return
        for request in link.pending.values():
            if request.lane == ROWS and request.places:
                # Room for the answer is of no use to a server that can't see it.
                request.arrays = request.arrays[:1] if request.meta["op"] == "pull_rows" else request.arrays
                request.places = ()

    def _lend(
        self, link: ServerConnection, shapes: Sequence[tuple[tuple[int, ...], np.dtype[Any]]]
    ) -> Allocation | None:
        return self._arena.lend(shapes) if self._arena is not None and link.here else None

    def close(self) -> None:
        super().close()
        if self._arena is not None:
            self._arena.close()

    def pull_rows(
        self, table: str, keys: Any, *, create: bool = True, out: Array | None = None
    ) -> Future[Array]:
        """The rows of `keys`, int64[n] (they may repeat): [n, width], written to `out` where it is given;
        without it, and with one server, nothing is copied. Unknown keys get rows, where `create`; otherwise
        their first values come and nothing is kept."""
        known, keys = self._table(table), _as_keys(keys)
        shape, dtype = (len(keys), known.width), sharding_plan.as_dtype(known.dtype)
        if out is not None and (out.shape != shape or out.dtype != dtype):
            raise InputError(
                f"out must be {known.dtype}[{len(keys)}, {known.width}]. "
                f"Received: {out.dtype.name}{list(out.shape)}"
            )
        where, futures = self._where(keys), []
        loans: list[Allocation | None] = []
        with self.lock:
            for link, index in zip(self.links, where, strict=True):
                meta, own = {"table": table, "create": create, **self.told()}, _taken(keys, index)
                loan = self._lend(link, [(own.shape, own.dtype), ((len(own), known.width), dtype)])
                loans.append(loan)
                if loan is None:
                    futures.append(self.request(link, "pull_rows", meta, [own], lane=ROWS))
                else:
                    loan.arrays[0][...] = own
                    futures.append(self.request(link, "pull_rows", meta, loan.arrays, ROWS, loan.places))

        def arrived(answers: list[Message]) -> Array:
            self.row_versions = [answer.meta["version"] for answer in answers]
            if out is None and len(where) == 1:
                mine = loans[0]
                return answers[0].arrays[0] if mine is None or answers[0].arrays else mine.hand_out(1)
            result = np.empty(shape, dtype) if out is None else out
            for index, answer, loan in zip(where, answers, loans, strict=True):
                rows = loan.arrays[1] if loan is not None and not answer.arrays else answer.arrays[0]
                result[... if index is None else index] = rows
            return result

        return self._given_back(gathered(futures, self.pump, arrived), loans)

    @staticmethod
    def _given_back(future: Future[Any], loans: Sequence[Allocation | None]) -> Future[Any]:
        def give_back(_: Future[Any]) -> None:
            for loan in loans:
                if loan is not None:
                    loan.give_back()

        future.then(give_back)
        return future

    def push_rows(
        self, table: str, keys: Any, gradients: Any, sequence: int, *, shard: int | None = None, rows: int = 1
    ) -> Future[str]:
        """One update of a table alone, at once whatever the mode: gradients, [n, width], for int64[n] keys;
        those of equal keys are added up. `sequence` counts the shard's pushes to this table from 0."""
        self._table(table)
        split = self.split({table: (keys, gradients)})
        meta = {"table": table, "shard": self.hosted(shard), **as_counts(sequence=sequence, rows=rows)}

        def ask(server: int) -> Future[Any]:
            link, given = self.links[server], split[server][0]
            with self.lock:
                loan = self._lend(link, [(array.shape, array.dtype) for array in given])
                if loan is None:
                    return self.request(link, "push_rows", meta, given, lane=ROWS)
                for target, array in zip(loan.arrays, given, strict=True):
                    target[...] = array
                asked = self.request(link, "push_rows", meta, loan.arrays, ROWS, loan.places)
            return self._given_back(asked, [loan])

        asks = [partial(ask, server) for server in range(len(self.links))]
        answers = self.suspects_first(asks, self.not_finite(split))
        return gathered([answers], self.pump, lambda _: "applied")

    def not_finite(self, split: Sequence[Sequence[tuple[Array, Array]]]) -> list[int]:
        """The servers, of several, whose rows' gradients aren't finite; see `split`."""
        if len(self.links) == 1:
            return []
        return [
            server for server, pairs in enumerate(split) if not all(native.finite(rows) for _, rows in pairs)
        ]

    def read_rows(self, table: str, *, block: int = 1 << 16) -> Iterator[tuple[Array, Array]]:
        """All rows of a table, as (int64[n] keys, [n, width] rows), server by server, in no order of keys.
        Other workers should not push meanwhile: rows may be missed where some are evicted."""
        self._table(table)
        for link in self.links:
            start = 0
            while True:
                meta = {"table": table, "start": start, "stop": start + block}
                answer = self.request(link, "read_rows", meta, lane=ROWS).result()
                if not len(answer.arrays[0]):
                    break
                yield answer.arrays[0], answer.arrays[1]
                start += block

    def load_rows(self, table: str, keys: Any, rows: Any) -> Future[Any]:
        """Sets rows, [n, width], of distinct int64[n] keys; slots of new ones start anew."""
        known = self._table(table)
        pairs = self.split({table: (keys, np.asarray(rows, sharding_plan.as_dtype(known.dtype)))}, add=False)
        metas = [{"table": table, "names": ["keys", "values"]} for _ in self.links]
        return self.each("load_rows", metas, [list(pair[0]) for pair in pairs], lane=ROWS)

    def _table(self, name: str) -> Table:
        if name not in self._tables:
            known = ", ".join(self._tables) or "none"
            raise InputError(f"No table is called {name!r}; this worker defined: {known}")
        return self._tables[name]

    def _where(self, keys: Array) -> list[Array | None]:
        """For each server, which of `keys` it holds; None: all."""
        if len(self.links) == 1:
            return [None]
        owners = server_of(keys, len(self.links))
        return [np.flatnonzero(owners == link.server) for link in self.links]

    def split(
        self, tables: Mapping[str, tuple[Any, Any]], add: bool = True
    ) -> list[list[tuple[Array, Array]]]:
        """For each server and table: the keys that it holds and their rows; equal keys added up first."""
        split: list[list[tuple[Array, Array]]] = [[] for _ in self.links]
        for name, (keys, gradients) in tables.items():
            known, keys = self._table(name), _as_keys(keys)
            rows = np.ascontiguousarray(gradients)
            if rows.shape != (len(keys), known.width) or rows.dtype.name != known.dtype:
                raise InputError(
                    f"Gradients of table {name!r} must be {known.dtype}[{len(keys)}, {known.width}], a row "
                    f"for each key. Received: {rows.dtype.name}{list(rows.shape)}"
                )
            if add and len(keys) > 1 and not bool((keys[1:] > keys[:-1]).all()):
                keys, rows = summed(keys, rows)
            for server, index in enumerate(self._where(keys)):
                split[server].append((_taken(keys, index), _taken(rows, index)))
        return split


def as_counts(**given: Any) -> dict[str, int]:
    """Each as a Python int. Raises InputError for what isn't a whole number."""
    try:
        return {name: operator.index(value) for name, value in given.items()}
    except TypeError:
        told = ", ".join(f"{name}={value!r}" for name, value in given.items())
        raise InputError(f"{' and '.join(given)} must be whole numbers. Received: {told}") from None


def _as_keys(keys: Any) -> Array:
    """int64[n]. Raises InputError for what has no exact int64."""
    found = np.asarray(keys)
    if found.ndim != 1 or (found.size and found.dtype.kind not in "iu"):
        raise InputError(f"Keys must be integers, [n]. Received: {found.dtype.name}{list(found.shape)}")
    if found.dtype == np.uint64 and found.size and int(found.max()) > np.iinfo(np.int64).max:
        raise InputError(f"A key must fit into int64. Received: {int(found.max())}")
    return np.ascontiguousarray(found, np.int64)


def _taken(array: Array, index: Array | None) -> Array:
    return array if index is None else array[index]
