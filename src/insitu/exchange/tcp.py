"""The transport between hosts: TCP.

A result is computed in memory of the transport's own, and replaces the caller's data only when it is
complete: a loss leaves buffers as they were.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import numpy as np

from insitu.exchange.algorithms import ALGORITHMS, CHUNK_BYTES, Algorithm
from insitu.exchange.pages import Pages, PageSwapper
from insitu.exchange.peer_connections import PeerConnections
from insitu.exchange.plan import (
    MAX_PROBE_BYTES,
    MEASURED,
    AlgorithmName,
    Costs,
    LinearCost,
    Members,
    Reduction,
    RunReduction,
    WaitStats,
    choose_algorithm,
    split_chunks,
)
from insitu.exchange.tcp_session import TcpSession, as_bytes

_PROBE_REPEATS = {64: 11, MAX_PROBE_BYTES: 5}
"""Bytes of the rows that latency and bandwidth are measured with, and how often."""
_WARM_UP_REPEATS = 3
_MAX_PRIVATE_STAGING_BYTES = 128 * 1024
"""Rows up to this size have staging memory of their own. Larger ones share one, whose pages are swapped with
those of the array."""


class TcpTransport:
    """A Transport for members that are connected in pairs."""

    name = "tcp"

    def __init__(
        self, members: Members, connections: PeerConnections, ranks: Sequence[int], generation: int = 0
    ) -> None:
        """`ranks` are the members' ranks in the group."""
        self._members = members
        #: The operations over the connections.
        self.session = TcpSession(members, connections, ranks, generation)
        self._pages: list[Pages] = []
        self._staging: Pages | None = None
        self._swapper = PageSwapper()
        #: The measured cost of each algorithm.
        self.costs = self._measure_costs()

    @property
    def wait_stats(self) -> WaitStats:
        """How long this process has waited for others."""
        return self.session.wait_stats

    # Measurement

    def _measure_costs(self) -> Costs:
        """Return the cost of each algorithm, the same on all members: the highest that any of them
        measured."""
        probes = [
            (self._make_probe(name, size), _PROBE_REPEATS[size])
            for name in MEASURED
            for size in _PROBE_REPEATS
        ]
        for probe, _ in _WARM_UP_REPEATS * probes:
            probe()  # connections get faster while the system learns how much it may send
        # The median of several: the first one waits for members that are still busy with the previous one.
        own = np.array([statistics.median(probe() for _ in range(count)) for probe, count in probes])
        highest = self._gather_values(own).max(axis=0).reshape(len(MEASURED), len(_PROBE_REPEATS))
        least, most = _PROBE_REPEATS
        return {
            name: LinearCost(short, max(long - short, 0.0) / (most - least))
            for name, (short, long) in zip(MEASURED, highest.tolist(), strict=True)
        }

    def _make_probe(self, name: AlgorithmName, size: int) -> Callable[[], float]:
        """Return a function that reduces rows of `size` bytes and returns the seconds that it took."""
        dtype, count = np.dtype(np.float32), len(self._members.shards[self._members.rank])
        rows = np.zeros((max(1, count), size // dtype.itemsize), dtype)
        reduction = Reduction("sum", dtype, rows.shape[1], tuple(rows[:count]), rows[0])
        algorithm = ALGORITHMS[name](self.session, reduction, np.empty_like(rows[0]))

        def measure() -> float:
            start = time.perf_counter()
            algorithm.run(None)
            return time.perf_counter() - start

        return measure

    def _gather_values(self, values: np.ndarray) -> np.ndarray:
        """Return one row of values from each member."""
        session = self.session
        out = np.zeros((self._members.size, values.size))
        out[self._members.rank] = values
        session.begin("measurements")
        for peer in session.peers:
            session.channel(peer).send(as_bytes(out[self._members.rank]))
            session.channel(peer).receive(as_bytes(out[peer]))
        session.run_until(session.is_complete)
        return out

    # Reduction

    def allocate(self, size: int, keep: np.ndarray | None = None) -> np.ndarray:
        """See Transport."""
        session = self.session
        session.begin("buffer")
        session.run_until(session.is_complete)
        if keep is not None and not isinstance(keep.base, Pages):
            return keep  # memory of another transport: reduced by copying
        pages = Pages(size) if keep is None else keep.base
        self._pages.append(pages)
        return pages.array() if keep is None else keep

    def prepare(self, reduction: Reduction) -> RunReduction:
        """See Transport."""
        name = choose_algorithm(self._members, reduction.row_bytes, CHUNK_BYTES, self.costs)
        if reduction.scatter is not None:
            name = "gather" if name in ("gather", "star") else "direct"
            return ALGORITHMS[name](self.session, reduction, reduction.result).run
        if name == "gather" or (name == "star" and reduction.row_bytes <= _MAX_PRIVATE_STAGING_BYTES):
            # These write the result only when all rows have arrived, so it needs no staging.
            return ALGORITHMS[name](self.session, reduction, reduction.result).run
        return self._prepare_staged(reduction, name)

    def _prepare_staged(self, reduction: Reduction, name: str) -> RunReduction:
        """Prepare a reduction to the staging memory, whose pages are swapped with the array's at the end."""
        result = reduction.result.view(np.uint8)
        swappable = any(pages.holds(result) for pages in self._pages)
        prepared: list[tuple[Pages, Algorithm]] = []

        def run(weights: Sequence[float] | None) -> bool:
            staging = self._get_staging(reduction.row_bytes)
            if not prepared or prepared[0][0] is not staging:
                target = staging.array()[: reduction.row_bytes].view(reduction.dtype)
                prepared[:] = [(staging, ALGORITHMS[name](self.session, reduction, target))]
            if not prepared[0][1].run(weights):
                return False
            self._swapper.move(staging, result, swappable)
            return True

        return run

    def _get_staging(self, size: int) -> Pages:
        if self._staging is None or self._staging.size < size:
            self._staging = Pages(size)
        return self._staging

    # Copies

    def gather(self, rows: Sequence[np.ndarray], out: np.ndarray, label: str) -> None:
        """See Transport."""
        session, shards = self.session, self._members.shards
        session.begin(label)
        own = shards[self._members.rank]
        for shard, row in zip(own, rows, strict=True):
            out[shard] = row
        if out.shape[1]:
            for peer in session.peers:
                for shard in own:
                    session.channel(peer).send(as_bytes(out[shard]))
                for shard in shards[peer]:
                    session.channel(peer).receive(as_bytes(out[shard]))
        session.run_until(session.is_complete)

    def broadcast(self, data: np.ndarray, root: int, label: str) -> None:
        """See Transport. The root sends one part to each other member, which sends it on to the rest."""
        session, rank = self.session, self._members.rank
        session.begin(label)
        others = [r for r in range(self._members.size) if r != root]
        cuts = [len(data) * i // len(others) for i in range(len(others) + 1)]
        part = {r: (cuts[i], cuts[i + 1]) for i, r in enumerate(others)}
        if rank == root:
            for peer, (low, high) in part.items():
                self._send_chunks(peer, data, low, high)
            session.run_until(session.is_complete)
            return
        staging = self._get_staging(len(data)).array()[: len(data)]
        chunks = split_chunks(*part[rank], CHUNK_BYTES)
        for low, high in chunks:
            session.channel(root).receive(as_bytes(staging[low:high]))
        for peer in others:
            if peer != rank:
                for low, high in split_chunks(*part[peer], CHUNK_BYTES):
                    session.channel(peer).receive(as_bytes(staging[low:high]))
        forwarded = 0

        def advance() -> bool:
            nonlocal forwarded
            received = session.channel(root).received - session.preamble[root]
            while forwarded < received:
                for peer in others:
                    if peer != rank:
                        self._send_chunks(peer, staging, *chunks[forwarded])
                forwarded += 1
            return session.have_agreed() and forwarded == len(chunks) and session.is_idle()

        session.run_until(advance)
        np.copyto(data, staging)

    def _send_chunks(self, peer: int, data: np.ndarray, low: int, high: int) -> None:
        for start, stop in split_chunks(low, high, CHUNK_BYTES):
            self.session.channel(peer).send(as_bytes(data[start:stop]))

    def close(self) -> None:
        """See Transport."""
        self.session.close()
