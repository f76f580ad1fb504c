"""Three ways to reduce over a stream, all with the one order of summation. See `costs` for when each wins.

Each is made once for its rows and run many times. `rows` are the flat rows of the shards hosted here;
`target` is memory of the transport's own for the whole result, which `run` returns True for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import numpy as np

from insitu.exchange.arithmetic import Factors, Reducer, bounds, chunks, coefficients
from insitu.exchange.costs import chain_order
from insitu.exchange.stream import Stream, as_bytes
from insitu.exchange.transport import Reduction

CHUNK_BYTES = 256 * 1024
DEPTH = 4
"""Chunks that may be under way between two members before they are summed. So many of them lie in the
second-level cache: what comes out of a socket is still there when it is summed, and a sum when it is sent."""
_LAG = 2
"""Chunks of rows that go ahead of the sums."""


class Algorithm(Protocol):
    def run(self, weights: Sequence[float] | None) -> bool:
        """Reduces. False: all weights were 0, and the target means nothing."""


class _Base:
    def __init__(self, stream: Stream, reduction: Reduction, limit: int) -> None:
        members = stream.members
        self.stream = stream
        self.members = members
        self.reduction = reduction
        self.reducer = Reducer(reduction.op, reduction.dtype, members.num_shards, limit)
        self.text = str(reduction)
        self.mine = members.shards[members.rank]

    def factors(self) -> Factors | None:
        return coefficients(self.stream.weights(), self.reduction.dtype)


class Gather(_Base):
    """Everybody sends its rows to everybody."""

    def __init__(self, stream: Stream, reduction: Reduction, target: np.ndarray) -> None:
        super().__init__(stream, reduction, reduction.length)
        table = np.empty((self.members.num_shards, reduction.length), reduction.dtype)
        own = list(reduction.rows)
        if own and self._spoils(own[0], target):
            self._copies = [(table[self.mine[0]], own[0])]
            own[0] = table[self.mine[0]]
        else:
            self._copies = []
        self._target = target
        rows = list(table)
        for shard, row in zip(self.mine, own, strict=True):
            rows[shard] = row
        start, stop = reduction.scatter or (0, reduction.length)
        self._summands = [row[start:stop] for row in rows]
        full = bool(reduction.length)
        self._outgoing = [as_bytes(row) for row in own if full]
        self._incoming = {
            peer: [as_bytes(table[shard]) for shard in self.members.shards[peer] if full]
            for peer in stream.peers
        }

    def _spoils(self, own: np.ndarray, target: np.ndarray) -> bool:
        """Whether summing to `target` would change the row `own`, which it is, before that is added."""
        early = self.mine[0] == 0 or (self.mine[0] == 1 and self.reduction.op != "weighted_mean")
        return not early and self.reducer.wide is self.reduction.dtype and np.shares_memory(own, target)

    def run(self, weights: Sequence[float] | None) -> bool:
        stream = self.stream
        stream.begin(self.text, weights)
        for place, row in self._copies:
            np.copyto(place, row)
        for peer, views in self._incoming.items():
            channel = stream.channel(peer)
            channel.out.extend(self._outgoing)
            channel.into.extend(views)
        stream.pump(stream.settled)
        factors = None if weights is None else self.factors()
        if weights is not None and factors is None:
            return False
        self.reducer.reduce(self._summands, self._target, factors)
        return True


class Direct(_Base):
    """Everybody sums one part of the length for all.

    The stream to a peer alternates: rows of a chunk of the peer's part, then the sum of an earlier chunk of
    this member's, which is still in the processor's cache.
    """

    def __init__(self, stream: Stream, reduction: Reduction, target: np.ndarray) -> None:
        size = CHUNK_BYTES // reduction.dtype.itemsize
        super().__init__(stream, reduction, size)
        members = self.members
        parts = bounds(reduction.length, members.size, reduction.dtype.itemsize)
        self._own = chunks(*parts[members.rank], size)
        self._target = target
        self._offset = reduction.scatter[0] if reduction.scatter else 0
        self._table = np.empty((DEPTH, members.num_shards, size), reduction.dtype)
        self._outgoing = {peer: self._order(chunks(*parts[peer], size), self._own) for peer in stream.peers}
        self._incoming = {peer: self._order(self._own, chunks(*parts[peer], size)) for peer in stream.peers}
        self._arrivals = {
            peer: self._complete(self._incoming[peer], len(members.shards[peer])) for peer in stream.peers
        }

    def _order(
        self, rows: list[tuple[int, int]], sums: list[tuple[int, int]]
    ) -> list[tuple[bool, int, int, int]]:
        """What goes one way between two members: (whether it is a sum, number, low, high) of each chunk."""
        sums = [] if self.reduction.scatter is not None else sums
        order = []
        for turn in range(max(len(rows), len(sums) + _LAG if sums else 0)):
            if turn < len(rows):
                order.append((False, turn, *rows[turn]))
            if 0 <= turn - _LAG < len(sums):
                order.append((True, turn - _LAG, *sums[turn - _LAG]))
        return order

    def _complete(self, order: list[tuple[bool, int, int, int]], rows: int) -> list[int]:
        """After how many buffers from a peer each chunk of rows is complete."""
        count, arrivals = 0, []
        for is_sum, *_ in order:
            count += 1 if is_sum else rows
            if not is_sum:
                arrivals.append(count)
        return arrivals

    def run(self, weights: Sequence[float] | None) -> bool:
        stream, own = self.stream, self._own
        stream.begin(self.text, weights)
        outgoing = {peer: iter(order) for peer, order in self._outgoing.items()}
        incoming = {peer: iter(order) for peer, order in self._incoming.items()}
        queued = {peer: next(order, None) for peer, order in outgoing.items()}
        asked = {peer: next(order, None) for peer, order in incoming.items()}
        summed = 0
        factors: Factors | None = None
        agreed = False

        def advance() -> None:
            for peer in stream.peers:
                while (item := queued[peer]) is not None and not (item[0] and item[1] >= summed):
                    self._send(peer, item)
                    queued[peer] = next(outgoing[peer], None)
                while (item := asked[peer]) is not None and (item[0] or item[1] < summed + DEPTH):
                    self._receive(peer, item)
                    asked[peer] = next(incoming[peer], None)

        def step() -> bool:
            nonlocal summed, factors, agreed
            if not agreed:
                agreed = stream.agreed()
                if not agreed:
                    return False
                factors = None if weights is None else self.factors()
            before = summed
            while summed < len(own) and self._came(summed):
                if weights is None or factors is not None:
                    self._sum(summed, factors)
                summed += 1
            if summed != before:
                advance()
            return summed == len(own) and stream.idle()

        advance()
        stream.pump(step)
        return weights is None or factors is not None

    def _send(self, peer: int, item: tuple[bool, int, int, int]) -> None:
        is_sum, _, low, high = item
        channel = self.stream.channel(peer)
        if is_sum:
            channel.send(as_bytes(self._target[low:high]))
        else:
            for row in self.reduction.rows:
                channel.send(as_bytes(row[low:high]))

    def _receive(self, peer: int, item: tuple[bool, int, int, int]) -> None:
        is_sum, number, low, high = item
        channel = self.stream.channel(peer)
        if is_sum:
            channel.receive(as_bytes(self._target[low:high]))
        else:
            for shard in self.members.shards[peer]:
                channel.receive(as_bytes(self._table[number % DEPTH, shard, : high - low]))

    def _came(self, number: int) -> bool:
        stream = self.stream
        return all(
            stream.channel(peer).received >= stream.ahead[peer] + self._arrivals[peer][number]
            for peer in stream.peers
        )

    def _sum(self, number: int, factors: Factors | None) -> None:
        low, high = self._own[number]
        rows = [row[: high - low] for row in self._table[number % DEPTH]]
        for shard, row in zip(self.mine, self.reduction.rows, strict=True):
            rows[shard] = row[low:high]
        self.reducer.reduce(rows, self._target[low - self._offset : high - self._offset], factors)


class Chain(_Base):
    """A running sum goes through all members in shard order, and the result comes back."""

    def __init__(self, stream: Stream, reduction: Reduction, target: np.ndarray) -> None:
        size = CHUNK_BYTES // reduction.dtype.itemsize
        super().__init__(stream, reduction, size)
        order = chain_order(self.members)
        assert order is not None  # noqa: S101 (chosen only where there is one)
        at = order.index(self.members.rank)
        self._before = [shard for rank in order[:at] for shard in self.members.shards[rank]]
        self._previous = order[at - 1] if at else None
        self._next = order[at + 1] if at + 1 < len(order) else None
        self._chunks = chunks(0, reduction.length, size)
        self._target = target
        self._ring = np.empty((DEPTH, min(size, reduction.length)), self.reducer.wide)

    def run(self, weights: Sequence[float] | None) -> bool:
        stream = self.stream
        stream.begin(self.text, weights)
        factors: Factors | None = None
        meant = True
        ready = False
        asked = summed = returned = 0
        if self._next is not None:
            for low, high in self._chunks:
                stream.channel(self._next).receive(as_bytes(self._target[low:high]))

        def step() -> bool:
            nonlocal factors, meant, ready, asked, summed, returned
            if not ready and stream.agreed():
                ready = True
                if weights is not None:
                    factors = self.factors()
                    meant = factors is not None
            asked = self._ask(asked, self._free(summed))
            while ready and summed < self._free(summed) and self._came(summed):
                self._sum(summed, factors, meant)
                summed += 1
            returned = self._hand_back(returned)
            return ready and summed == len(self._chunks) and stream.idle() and self._all_back(returned)

        stream.pump(step)
        return meant

    def _free(self, summed: int) -> int:
        """Chunks that may be begun: the ring is full of sums that the next member hasn't been sent yet."""
        done = (
            summed
            if self._next is None
            else self.stream.channel(self._next).sent - self._sent_ahead(self._next)
        )
        return min(len(self._chunks), max(0, done) + DEPTH)

    def _sent_ahead(self, peer: int) -> int:
        return 1 + (1 if self.reduction.op == "weighted_mean" and self.mine else 0)

    def _ask(self, asked: int, free: int) -> int:
        if self._previous is not None:
            while asked < free:
                low, high = self._chunks[asked]
                self.stream.channel(self._previous).receive(as_bytes(self._ring[asked % DEPTH][: high - low]))
                asked += 1
        return asked

    def _came(self, number: int) -> bool:
        peer = self._previous
        return peer is None or self.stream.channel(peer).received > self.stream.ahead[peer] + number

    def _sum(self, number: int, factors: Factors | None, meant: bool) -> None:
        low, high = self._chunks[number]
        total = self._ring[number % DEPTH][: high - low]
        if meant:
            own = None if factors is None else [factors[shard] for shard in self.mine]
            fresh = not any(factors is None or factors[shard] != 0 for shard in self._before)
            self.reducer.extend(total, [row[low:high] for row in self.reduction.rows], own, fresh)
        if self._next is not None:
            self.stream.channel(self._next).send(as_bytes(total))
        else:
            out = self._target[low:high]
            if meant:
                self.reducer.finish(total, out)
            if self._previous is not None:
                self.stream.channel(self._previous).send(as_bytes(out))

    def _hand_back(self, returned: int) -> int:
        """Sends what came back from the next member on to the previous one."""
        if self._next is not None and self._previous is not None:
            came = self.stream.channel(self._next).received - self.stream.ahead[self._next]
            while returned < came:
                low, high = self._chunks[returned]
                self.stream.channel(self._previous).send(as_bytes(self._target[low:high]))
                returned += 1
        return returned

    def _all_back(self, returned: int) -> bool:
        return self._next is None or self._previous is None or returned == len(self._chunks)


ALGORITHMS: Mapping[str, Callable[[Stream, Reduction, np.ndarray], Algorithm]] = {
    "gather": Gather,
    "direct": Direct,
    "chain": Chain,
}
