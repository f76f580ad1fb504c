"""The transport of several ranks on each of several hosts: shared memory within a host, TCP between hosts.

The hosts' ranks are matched in lanes: the first ranks of all hosts form one, the second another, as many as
the smallest host has ranks. Each lane moves its own part of a large buffer between the hosts, reading the
rows of all ranks of its host in place; the result is put together in memory that the host's ranks share,
and once it is whole, each takes it from there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from insitu.exchange.algorithms import ALGORITHMS, CHUNK_BYTES, Algorithm
from insitu.exchange.arithmetic import bounds
from insitu.exchange.costs import choose
from insitu.exchange.shm import SharedMemoryTransport
from insitu.exchange.shm_layout import SLOT_BYTES
from insitu.exchange.tcp import TcpTransport
from insitu.exchange.transport import MemberLost, Members, Reduction, RunReduction, WaitStats


@dataclass(frozen=True, slots=True)
class HostTopology:
    """Pure: which ranks share a host, and what follows from it for one of them.

    `ranks[h]` are the ranks on host h, ascending; hosts are in the order of their first ranks.
    """

    members: Members
    ranks: tuple[tuple[int, ...], ...]

    @property
    def here(self) -> int:
        return next(h for h, ranks in enumerate(self.ranks) if self.members.rank in ranks)

    @property
    def position(self) -> int:
        """Of this rank on its host."""
        return self.ranks[self.here].index(self.members.rank)

    @property
    def lanes(self) -> int:
        return min(map(len, self.ranks))

    def lane(self, number: int) -> tuple[int, ...]:
        """The ranks of one lane, by host."""
        return tuple(ranks[number] for ranks in self.ranks)

    @property
    def shards(self) -> tuple[tuple[int, ...], ...]:
        """All shards of each host, ascending."""
        return tuple(tuple(sorted(s for r in ranks for s in self.members.shards[r])) for ranks in self.ranks)

    def between(self) -> Members:
        """The hosts as members."""
        return Members(self.here, self.shards, self.members.num_shards)

    def within(self) -> Members:
        """This host's ranks as members, with its shards numbered from 0."""
        order = self.shards[self.here]
        shards = tuple(
            tuple(order.index(s) for s in self.members.shards[rank]) for rank in self.ranks[self.here]
        )
        return Members(self.position, shards, len(order))


class HierarchicalTransport:
    """A Transport. `wire` is None for a rank that is in no lane."""

    name = "shm+tcp"

    def __init__(self, hosts: HostTopology, shared: SharedMemoryTransport, wire: TcpTransport | None) -> None:
        self._hosts = hosts
        self._shared = shared
        self._wire = wire
        self._leads = hosts.position == 0
        self._order = hosts.shards[hosts.here]
        if wire is not None:
            shared.meanwhile(wire.stream.await_elsewhere)

    @property
    def account(self) -> WaitStats:
        return self._shared.account

    @contextmanager
    def _on_wire(self) -> Iterator[TcpTransport]:
        """Work of this rank between hosts; a loss there is told to the ranks here."""
        assert self._wire is not None  # noqa: S101 (ranks in no lane never come here)
        before = self._wire.account.waiting
        try:
            yield self._wire
        except MemberLost as gone:
            self._shared.announce(gone.rank)
            raise
        self.account.waiting += self._wire.account.waiting - before

    @contextmanager
    def _at_home(self) -> Iterator[None]:
        """Work among the ranks here; a loss here is told to the other hosts."""
        try:
            yield
        except MemberLost as gone:
            if self._wire is not None:
                self._wire.tell_lost(gone.rank)
            raise

    def allocate(self, size: int, keep: np.ndarray | None = None) -> np.ndarray:
        with self._at_home():
            return self._shared.allocate(size, keep)

    # Reduction

    def reduction(self, reduction: Reduction) -> RunReduction:
        if reduction.scatter is not None:
            return self._scatter(reduction)
        return self._small(reduction) if reduction.row_bytes <= SLOT_BYTES else self._large(reduction)

    def _scatter(self, reduction: Reduction) -> RunReduction:
        whole = np.empty(reduction.length, reduction.dtype)
        inner = self.reduction(
            Reduction(reduction.op, reduction.dtype, reduction.length, reduction.rows, whole)
        )
        start, stop = reduction.scatter or (0, 0)

        def run(weights: Sequence[float] | None) -> bool:
            reduced = inner(weights)
            if reduced:
                reduction.result[...] = whole[start:stop]
            return reduced

        return run

    def _small(self, reduction: Reduction) -> RunReduction:
        """The first rank of each host collects its host's rows and reduces with those of the other hosts."""
        rows = np.zeros((len(self._order), reduction.length), reduction.dtype)
        result = np.zeros(reduction.length, reduction.dtype)
        flag = np.zeros(1, np.uint8)
        outer = Reduction(reduction.op, reduction.dtype, reduction.length, tuple(rows), result)
        inner = self._wire.reduction(outer) if self._leads and self._wire is not None else None
        what = str(reduction)

        def run(weights: Sequence[float] | None) -> bool:
            with self._at_home():
                self._shared.gather([_bytes(row) for row in reduction.rows], _table(rows), what)
                own = self._gather_weights(weights)
            if inner is not None:
                with self._on_wire():
                    flag[0] = inner(own)
            with self._at_home():
                self._shared.broadcast(flag, 0, what)
                self._shared.broadcast(_bytes(result), 0, what)
            if flag[0]:
                reduction.result[...] = result
            return bool(flag[0])

        return run

    def _gather_weights(self, weights: Sequence[float] | None) -> list[float] | None:
        """Those of all shards here, in their order."""
        if weights is None:
            return None
        table = np.zeros((len(self._order), 1), np.float64)
        self._shared.gather([_bytes(np.array([weight])) for weight in weights], _table(table), "weights")
        return [float(weight) for weight in table[:, 0]]

    def _large(self, reduction: Reduction) -> RunReduction:
        hosts = self._hosts
        part = bounds(reduction.length, hosts.lanes, reduction.dtype.itemsize)
        mine = part[hosts.position] if hosts.position < hosts.lanes else None
        prepared: list[tuple[object, Algorithm | None, np.ndarray]] = []

        def prepare() -> tuple[Algorithm | None, np.ndarray]:
            place, rows, whole = self._shared.lay_out(reduction)
            if not prepared or prepared[0][0] is not place:
                prepared[:] = [(place, self._lane(reduction, rows, whole, mine), whole)]
            return prepared[0][1], prepared[0][2]

        def run(weights: Sequence[float] | None) -> bool:
            with self._at_home():
                algorithm, whole = prepare()
                own = self._gather_weights(weights)
            reduced = np.zeros(1, np.uint8)
            if algorithm is not None:
                with self._on_wire():
                    reduced[0] = algorithm.run(own)
            with self._at_home():
                self._shared.broadcast(reduced, 0, "lanes")  # also the sign that all lanes here are through
                self._shared.meet("lanes")
            if reduced[0]:
                reduction.result[...] = whole
            return bool(reduced[0])

        return run

    def _lane(
        self,
        reduction: Reduction,
        rows: Sequence[np.ndarray],
        whole: np.ndarray,
        mine: tuple[int, int] | None,
    ) -> Algorithm | None:
        if mine is None or self._wire is None:
            return None
        low, high = mine
        target = whole[low:high]
        outer = Reduction(
            reduction.op, reduction.dtype, high - low, tuple(row[low:high] for row in rows), target
        )
        way = choose(self._hosts.between(), outer.row_bytes, CHUNK_BYTES, self._wire.costs)
        return ALGORITHMS[way](self._wire.stream, outer, target)

    # Copies

    def gather(self, rows: Sequence[np.ndarray], out: np.ndarray, what: str) -> None:
        here = np.empty((len(self._order), out.shape[1]), np.uint8)
        with self._at_home():
            self._shared.gather(rows, here, what)
        if self._leads:
            with self._on_wire() as wire:
                wire.gather(list(here), out, what)
        with self._at_home():
            self._shared.broadcast(out.reshape(-1), 0, what)

    def broadcast(self, data: np.ndarray, root: int, what: str) -> None:
        hosts = self._hosts
        home = next(h for h, ranks in enumerate(hosts.ranks) if root in ranks)
        copy = np.array(data)
        if home == hosts.here:
            with self._at_home():
                self._shared.broadcast(copy, hosts.ranks[home].index(root), what)
        if self._leads:
            with self._on_wire() as wire:
                wire.broadcast(copy, home, what)
        if home != hosts.here:
            with self._at_home():
                self._shared.broadcast(copy, 0, what)
        data[...] = copy

    def close(self) -> None:
        self._shared.close()
        if self._wire is not None:
            self._wire.close()


def _bytes(array: np.ndarray) -> np.ndarray:
    return array.view(np.uint8)


def _table(array: np.ndarray) -> np.ndarray:
    return array.reshape(-1).view(np.uint8).reshape(len(array), array.shape[1] * array.dtype.itemsize)
