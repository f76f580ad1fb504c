"""The transport of several ranks on each of several hosts: shared memory within a host, TCP between hosts.

The ranks of different hosts are matched in lanes (see `topology`). Each lane moves its own part of a large
buffer between the hosts, and reads the rows of all ranks of its host in place. The result is computed in
memory that the host's ranks share. Once it is complete, each rank copies it from there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from insitu.exchange.algorithms import ALGORITHMS, CHUNK_BYTES, Algorithm
from insitu.exchange.plan import (
    HostTopology,
    MemberLost,
    Reduction,
    RunReduction,
    WaitStats,
    choose_algorithm,
    split_by_pages,
)
from insitu.exchange.shm import SharedMemoryTransport
from insitu.exchange.shm_layout import SLOT_BYTES
from insitu.exchange.tcp import TcpTransport


class HierarchicalTransport:
    """A Transport that combines one within each host and one between hosts."""

    name = "shm+tcp"

    def __init__(
        self, topology: HostTopology, local: SharedMemoryTransport, remote: TcpTransport | None
    ) -> None:
        """`remote` is None for a rank that is in no lane."""
        self._topology = topology
        self._local = local
        self._remote = remote
        self._leads = topology.local_rank == 0
        self._shards = topology.shards[topology.own_host]
        if remote is not None:
            local.session.set_on_sleep(remote.session.report_waiting_for)

    @property
    def wait_stats(self) -> WaitStats:
        """See Transport."""
        return self._local.wait_stats

    @contextmanager
    def _between_hosts(self) -> Iterator[TcpTransport]:
        """Report a loss between hosts to the ranks here."""
        assert self._remote is not None  # noqa: S101 (ranks in no lane never come here)
        before = self._remote.wait_stats.seconds
        try:
            yield self._remote
        except MemberLost as lost:
            self._local.session.announce_loss(lost.rank)
            raise
        self.wait_stats.seconds += self._remote.wait_stats.seconds - before

    @contextmanager
    def _within_host(self) -> Iterator[None]:
        """Report a loss here to the other hosts."""
        try:
            yield
        except MemberLost as lost:
            if self._remote is not None:
                self._remote.session.report_lost(lost.rank)
            raise

    def allocate(self, size: int, keep: np.ndarray | None = None) -> np.ndarray:
        """See Transport."""
        with self._within_host():
            return self._local.allocate(size, keep)

    # Reduction

    def prepare(self, reduction: Reduction) -> RunReduction:
        """See Transport."""
        if reduction.scatter is not None:
            return self._prepare_scatter(reduction)
        if reduction.row_bytes <= SLOT_BYTES:
            return self._prepare_small(reduction)
        return self._prepare_large(reduction)

    def _prepare_scatter(self, reduction: Reduction) -> RunReduction:
        """Prepare an all_reduce, of which this rank takes its part."""
        whole = np.empty(reduction.length, reduction.dtype)
        run_whole = self.prepare(
            Reduction(reduction.op, reduction.dtype, reduction.length, reduction.rows, whole)
        )
        start, stop = reduction.scatter or (0, 0)

        def run(weights: Sequence[float] | None) -> bool:
            reduced = run_whole(weights)
            if reduced:
                reduction.result[...] = whole[start:stop]
            return reduced

        return run

    def _prepare_small(self, reduction: Reduction) -> RunReduction:
        """Prepare a reduction in which the first rank of each host gathers its host's rows and reduces them
        with those of the other hosts."""
        rows = np.zeros((len(self._shards), reduction.length), reduction.dtype)
        result = np.zeros(reduction.length, reduction.dtype)
        flag = np.zeros(1, np.uint8)
        outer = Reduction(reduction.op, reduction.dtype, reduction.length, tuple(rows), result)
        run_outer = self._remote.prepare(outer) if self._leads and self._remote is not None else None
        label = str(reduction)

        def run(weights: Sequence[float] | None) -> bool:
            with self._within_host():
                self._local.gather([row.view(np.uint8) for row in reduction.rows], _as_byte_rows(rows), label)
                own = self._gather_weights(weights)
            if run_outer is not None:
                with self._between_hosts():
                    flag[0] = run_outer(own)
            with self._within_host():
                self._local.broadcast(flag, 0, label)
                self._local.broadcast(result.view(np.uint8), 0, label)
            if flag[0]:
                reduction.result[...] = result
            return bool(flag[0])

        return run

    def _gather_weights(self, weights: Sequence[float] | None) -> list[float] | None:
        """Return the weights of all shards of this host, in their order."""
        if weights is None:
            return None
        table = np.zeros((len(self._shards), 1), np.float64)
        rows = [np.array([weight]).view(np.uint8) for weight in weights]
        self._local.gather(rows, _as_byte_rows(table), "weights")
        return [float(weight) for weight in table[:, 0]]

    def _prepare_large(self, reduction: Reduction) -> RunReduction:
        """Prepare a reduction in which each lane reduces its part of the length."""
        topology = self._topology
        parts = split_by_pages(reduction.length, topology.num_lanes, reduction.dtype.itemsize)
        own_part = parts[topology.local_rank] if topology.own_lane else None
        prepared: list[tuple[object, Algorithm | None, np.ndarray]] = []

        def map_rows() -> tuple[Algorithm | None, np.ndarray]:
            key, rows, whole = self._local.map_rows(reduction)
            if not prepared or prepared[0][0] is not key:
                prepared[:] = [(key, self._prepare_lane(reduction, rows, whole, own_part), whole)]
            return prepared[0][1], prepared[0][2]

        def run(weights: Sequence[float] | None) -> bool:
            with self._within_host():
                algorithm, whole = map_rows()
                own = self._gather_weights(weights)
            reduced = np.zeros(1, np.uint8)
            if algorithm is not None:
                with self._between_hosts():
                    reduced[0] = algorithm.run(own)
            with self._within_host():
                self._local.broadcast(reduced, 0, "lanes")  # returns when all lanes here are done
                self._local.synchronize("lanes")
            if reduced[0]:
                reduction.result[...] = whole
            return bool(reduced[0])

        return run

    def _prepare_lane(
        self,
        reduction: Reduction,
        rows: Sequence[np.ndarray],
        whole: np.ndarray,
        part: tuple[int, int] | None,
    ) -> Algorithm | None:
        """Prepare the reduction of this lane's part; None for a rank in no lane."""
        if part is None or self._remote is None:
            return None
        low, high = part
        target = whole[low:high]
        outer = Reduction(
            reduction.op, reduction.dtype, high - low, tuple(row[low:high] for row in rows), target
        )
        hosts = self._topology.make_host_members()
        name = choose_algorithm(hosts, outer.row_bytes, CHUNK_BYTES, self._remote.costs)
        return ALGORITHMS[name](self._remote.session, outer, target)

    # Copies

    def gather(self, rows: Sequence[np.ndarray], out: np.ndarray, label: str) -> None:
        """See Transport."""
        here = np.empty((len(self._shards), out.shape[1]), np.uint8)
        with self._within_host():
            self._local.gather(rows, here, label)
        if self._leads:
            with self._between_hosts() as remote:
                remote.gather(list(here), out, label)
        with self._within_host():
            self._local.broadcast(out.reshape(-1), 0, label)

    def broadcast(self, data: np.ndarray, root: int, label: str) -> None:
        """See Transport."""
        topology = self._topology
        root_host = next(h for h, ranks in enumerate(topology.ranks) if root in ranks)
        copy = np.array(data)
        if root_host == topology.own_host:
            with self._within_host():
                self._local.broadcast(copy, topology.local_ranks.index(root), label)
        if self._leads:
            with self._between_hosts() as remote:
                remote.broadcast(copy, root_host, label)
        if root_host != topology.own_host:
            with self._within_host():
                self._local.broadcast(copy, 0, label)
        if data.flags.writeable:  # the root's own may not be
            data[...] = copy

    def close(self) -> None:
        """See Transport."""
        self._local.close()
        if self._remote is not None:
            self._remote.close()


def _as_byte_rows(array: np.ndarray) -> np.ndarray:
    return array.reshape(-1).view(np.uint8).reshape(len(array), array.shape[1] * array.dtype.itemsize)
