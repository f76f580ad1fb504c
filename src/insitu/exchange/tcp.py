"""The transport between hosts: TCP.

Results are put together in memory of the transport's own and take the place of the caller's data only when
they are complete, so that a loss leaves buffers as they were.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import numpy as np

from insitu.exchange import algorithms
from insitu.exchange.algorithms import ALGORITHMS, CHUNK_BYTES
from insitu.exchange.arithmetic import chunks
from insitu.exchange.costs import MEASURED, MEASURED_BYTES, AlgorithmName, Costs, LinearCost, choose
from insitu.exchange.pages import Pages, PageSwapper
from insitu.exchange.peer_connections import PeerConnections
from insitu.exchange.tcp_session import TcpSession, as_bytes
from insitu.exchange.transport import Members, Reduction, RunReduction, WaitStats

_PROBE_ROUNDS = {64: 11, MEASURED_BYTES: 5}
"""Bytes of the rows that latency and bandwidth are measured with, and how often."""
_WARM_UP = 3
_OWN_STAGING_BYTES = 128 * 1024
"""Rows up to this size have a place of their own where a result is put together, rather than one for all
arrays that is made part of the array by exchanging pages."""


class TcpTransport:
    """A Transport for members that are connected in pairs. `ranks` are the members' ranks in the group."""

    name = "tcp"

    def __init__(
        self, members: Members, links: PeerConnections, ranks: Sequence[int], generation: int = 0
    ) -> None:
        self._members = members
        self.stream = TcpSession(members, links, ranks, generation)
        self._pages: list[Pages] = []
        self._staging: Pages | None = None
        self._exchanger = PageSwapper()
        self.costs = self._measure()

    @property
    def account(self) -> WaitStats:
        return self.stream.account

    def _measure(self) -> Costs:
        """What reducing takes in each way, the same on all members: the worst that any of them saw."""
        probes = [(self._probe(way, size), _PROBE_ROUNDS[size]) for way in MEASURED for size in _PROBE_ROUNDS]
        for probe, _ in _WARM_UP * probes:
            probe()  # connections get faster while the system learns how much it may let through
        # Each several times, and the median: the first one waits for who is still busy with what was before.
        seen = np.array([statistics.median(probe() for _ in range(rounds)) for probe, rounds in probes])
        worst = self._everybodys(seen).max(axis=0).reshape(len(MEASURED), len(_PROBE_ROUNDS))
        least, most = _PROBE_ROUNDS
        return {
            way: LinearCost(short, max(long - short, 0.0) / (most - least))
            for way, (short, long) in zip(MEASURED, worst.tolist(), strict=True)
        }

    def _probe(self, way: AlgorithmName, size: int) -> Callable[[], float]:
        """Reduces rows of `size` bytes; returns the seconds that this took."""
        kind, mine = np.dtype(np.float32), len(self._members.shards[self._members.rank])
        rows = np.zeros((max(1, mine), size // kind.itemsize), kind)
        reduction = Reduction("sum", kind, rows.shape[1], tuple(rows[:mine]), rows[0])
        algorithm = ALGORITHMS[way](self.stream, reduction, np.empty_like(rows[0]))

        def run() -> float:
            start = time.perf_counter()
            algorithm.run(None)
            return time.perf_counter() - start

        return run

    def _everybodys(self, values: np.ndarray) -> np.ndarray:
        """One row of values from each member."""
        stream = self.stream
        out = np.zeros((self._members.size, values.size))
        out[self._members.rank] = values
        stream.begin("measurements")
        for peer in stream.peers:
            stream.channel(peer).send(as_bytes(out[self._members.rank]))
            stream.channel(peer).receive(as_bytes(out[peer]))
        stream.pump(stream.settled)
        return out

    def allocate(self, size: int, keep: np.ndarray | None = None) -> np.ndarray:
        stream = self.stream
        stream.begin("buffer")
        stream.pump(stream.settled)
        if keep is not None and not isinstance(keep.base, Pages):
            return keep  # memory of another transport: reduced by copying
        pages = Pages(size) if keep is None else keep.base
        self._pages.append(pages)
        return pages.array() if keep is None else keep

    def reduction(self, reduction: Reduction) -> RunReduction:
        way = choose(self._members, reduction.row_bytes, CHUNK_BYTES, self.costs)
        if reduction.scatter is not None:
            way = "gather" if way in ("gather", "star") else "direct"
            return ALGORITHMS[way](self.stream, reduction, reduction.result).run
        if way == "gather" or (way == "star" and reduction.row_bytes <= _OWN_STAGING_BYTES):
            # Nothing is written before all has come, so the result needs no other place first.
            return ALGORITHMS[way](self.stream, reduction, reduction.result).run
        return self._staged(reduction, way)

    def _staged(self, reduction: Reduction, way: str) -> RunReduction:
        result = reduction.result.view(np.uint8)
        swappable = any(pages.holds(result) for pages in self._pages)
        prepared: list[tuple[Pages, algorithms.Algorithm]] = []

        def run(weights: Sequence[float] | None) -> bool:
            staging = self._stage(reduction.row_bytes)
            if not prepared or prepared[0][0] is not staging:
                target = staging.array()[: reduction.row_bytes].view(reduction.dtype)
                prepared[:] = [(staging, ALGORITHMS[way](self.stream, reduction, target))]
            if not prepared[0][1].run(weights):
                return False
            self._exchanger.put(staging, result, swappable)
            return True

        return run

    def _stage(self, size: int) -> Pages:
        if self._staging is None or self._staging.size < size:
            self._staging = Pages(size)
        return self._staging

    def gather(self, rows: Sequence[np.ndarray], out: np.ndarray, what: str) -> None:
        stream, shards = self.stream, self._members.shards
        stream.begin(what)
        mine = shards[self._members.rank]
        for shard, row in zip(mine, rows, strict=True):
            out[shard] = row
        if out.shape[1]:
            for peer in stream.peers:
                for shard in mine:
                    stream.channel(peer).send(as_bytes(out[shard]))
                for shard in shards[peer]:
                    stream.channel(peer).receive(as_bytes(out[shard]))
        stream.pump(stream.settled)

    def broadcast(self, data: np.ndarray, root: int, what: str) -> None:
        """The root sends each other member one part, and that one sends it on to the rest."""
        stream, rank = self.stream, self._members.rank
        stream.begin(what)
        others = [r for r in range(self._members.size) if r != root]
        cuts = [len(data) * i // len(others) for i in range(len(others) + 1)]
        part = {r: (cuts[i], cuts[i + 1]) for i, r in enumerate(others)}
        if rank == root:
            for peer, (low, high) in part.items():
                self._send(peer, data, low, high)
            stream.pump(stream.settled)
            return
        staging = self._stage(len(data)).array()[: len(data)]
        pieces = chunks(*part[rank], CHUNK_BYTES)
        for low, high in pieces:
            stream.channel(root).receive(as_bytes(staging[low:high]))
        for peer in others:
            if peer != rank:
                for low, high in chunks(*part[peer], CHUNK_BYTES):
                    stream.channel(peer).receive(as_bytes(staging[low:high]))
        passed = 0

        def step() -> bool:
            nonlocal passed
            came = stream.channel(root).received - stream.ahead[root]
            while passed < came:
                for peer in others:
                    if peer != rank:
                        self._send(peer, staging, *pieces[passed])
                passed += 1
            return stream.agreed() and passed == len(pieces) and stream.idle()

        stream.pump(step)
        np.copyto(data, staging)

    def _send(self, peer: int, data: np.ndarray, low: int, high: int) -> None:
        for start, stop in chunks(low, high, CHUNK_BYTES):
            self.stream.channel(peer).send(as_bytes(data[start:stop]))

    def tell_lost(self, rank: int) -> None:
        """Tells all peers that `rank`, on this host, was lost."""
        self.stream.tell_lost(rank)

    def close(self) -> None:
        self.stream.close()
