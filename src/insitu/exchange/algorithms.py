"""Four ways to reduce over a stream, all with the one order of summation. See `costs` for when each wins.

Each is made once for its rows and run many times. `rows` are the flat rows of the shards hosted here;
`target` is memory for the whole result, which `run` returns True for. Where that is the caller's own, nothing
is written to it before the result is whole.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import numpy as np

from insitu.exchange.arithmetic import Factors, Reducer, bounds, chunks, coefficients
from insitu.exchange.costs import chain_order, hub
from insitu.exchange.schedule import Schedule, ScheduleStep, Transfer
from insitu.exchange.schedule_runner import ScheduleRunner
from insitu.exchange.tcp_session import TcpSession, as_bytes
from insitu.exchange.transport import Members, Reduction

CHUNK_BYTES = 256 * 1024
DEPTH = 4
"""Chunks that may be under way between two members before they are summed. So many of them lie in the
second-level cache: what comes out of a socket is still there when it is summed, and a sum when it is sent."""
_LAG = 2
"""Chunks of rows that go ahead of the sums."""
_STAR_CHUNK_BYTES = _LEAST_CHUNK_BYTES = 64 * 1024


def _chunk_bytes(shards: int) -> int:
    """Of each of so many rows, so that the chunks under way stay in the cache."""
    return max(_LEAST_CHUNK_BYTES, min(CHUNK_BYTES, 2 * CHUNK_BYTES // shards))


class Algorithm(Protocol):
    def run(self, weights: Sequence[float] | None) -> bool:
        """Reduces. False: all weights were 0, and the target means nothing."""


def _weights(stream: TcpSession, reduction: Reduction) -> dict[int, list[Transfer]]:
    """What each member sends before its rows."""
    if reduction.op != "weighted_mean":
        return {member: [] for member in range(stream.members.size)}
    return {
        member: [Transfer(stream.weights_of(member))] if shards else []
        for member, shards in enumerate(stream.members.shards)
    }


def _greeting(stream: TcpSession, weights: Mapping[int, Sequence[Transfer]]) -> dict[int, int]:
    return {peer: 1 + len(weights[peer]) for peer in stream.peers}


def _with_own(members: Members, own: Sequence[np.ndarray], others: Sequence[np.ndarray]) -> list[np.ndarray]:
    """All shards' rows: `own` for those hosted here, and those of `others`, by shard, for the rest."""
    rows = list(others)
    for shard, row in zip(members.shards[members.rank], own, strict=True):
        rows[shard] = row
    return rows


def gather(stream: TcpSession, reduction: Reduction, target: np.ndarray) -> Algorithm:
    """Everybody sends its rows to everybody."""
    members, length, dtype = stream.members, reduction.length, reduction.dtype
    reducer = Reducer(reduction.op, dtype, members.num_shards, length)
    rows = _with_own(members, reduction.rows, list(np.empty((members.num_shards, length), dtype)))
    weights = _weights(stream, reduction)
    full = bool(length)
    out = [*weights[members.rank], *(Transfer(row) for row in reduction.rows if full)]
    into = {
        peer: [*weights[peer], *(Transfer(rows[shard]) for shard in members.shards[peer] if full)]
        for peer in stream.peers
    }
    start, stop = reduction.scatter or (0, length)
    spoils = _spoils(stream, reduction, reducer, target)
    place = np.empty_like(target) if spoils else target
    summands = [row[start:stop] for row in rows]
    step = ScheduleStep(summands, place, {peer: 1 + len(flow) for peer, flow in into.items()})
    schedule = Schedule(
        dict.fromkeys(stream.peers, out),
        into,
        _greeting(stream, weights),
        [step] if stop > start else [],
        in_place=not spoils,
        deliver=(place, target) if spoils else None,
    )
    return ScheduleRunner(stream, reduction, reducer, schedule)


def _spoils(stream: TcpSession, reduction: Reduction, reducer: Reducer, target: np.ndarray) -> bool:
    """Whether summing to `target` would change this member's first row, which it is, before that is added."""
    mine = stream.members.shards[stream.members.rank]
    if not mine or not np.shares_memory(reduction.rows[0], target):
        return False
    early = mine[0] == 0 or (mine[0] == 1 and reduction.op != "weighted_mean")
    return not early and reducer.wide is reduction.dtype


def star(stream: TcpSession, reduction: Reduction, target: np.ndarray) -> Algorithm:
    """One member, the hub, is sent all rows, and sends the sums to all."""
    if not reduction.length:  # the hub answers once it has added something up
        return gather(stream, reduction, target)
    members, dtype = stream.members, reduction.dtype
    middle = hub(members)
    size = _STAR_CHUNK_BYTES // dtype.itemsize
    reducer = Reducer(reduction.op, dtype, members.num_shards, size)
    pieces = chunks(0, reduction.length, size)
    weights = _weights(stream, reduction)
    everybodys = [Transfer(stream.weights_table, 1)] if reduction.op == "weighted_mean" else []
    # A result that is wanted where the rows are is put together elsewhere: a loss leaves rows as they were.
    place = np.empty_like(target) if np.shares_memory(target, reduction.result) else target
    sums = [Transfer(place[low:high], number + 1) for number, (low, high) in enumerate(pieces)]
    deliver = None if place is target else (place, target)
    if members.rank != middle:
        rows = [Transfer(row[low:high]) for low, high in pieces for row in reduction.rows]
        come = [Transfer(segment.data) for segment in (*everybodys, *sums)]
        out, into = {middle: [*weights[members.rank], *rows]}, {middle: come}
        return ScheduleRunner(stream, reduction, reducer, Schedule(out, into, {middle: 1}, deliver=deliver))
    table = np.empty((members.num_shards, reduction.length), dtype)
    rows_of = {peer: [table[shard] for shard in members.shards[peer]] for peer in stream.peers}
    summands = _with_own(members, reduction.rows, list(table))
    greeting = _greeting(stream, weights)
    schedule = Schedule(
        {peer: [*everybodys, *sums] for peer in stream.peers},
        {
            peer: [*weights[peer], *(Transfer(row[low:high]) for low, high in pieces for row in rows)]
            for peer, rows in rows_of.items()
        },
        greeting,
        [
            ScheduleStep(
                [row[low:high] for row in summands],
                place[low:high],
                {peer: greeting[peer] + (number + 1) * len(rows) for peer, rows in rows_of.items()},
            )
            for number, (low, high) in enumerate(pieces)
        ],
        answers=True,
        deliver=deliver,
    )
    return ScheduleRunner(stream, reduction, reducer, schedule)


def direct(stream: TcpSession, reduction: Reduction, target: np.ndarray) -> Algorithm:
    """Everybody sums one part of the length for all.

    The stream to a peer alternates: rows of a chunk of the peer's part, then the sum of an earlier chunk of
    this member's, which is still in the processor's cache.
    """
    members, dtype = stream.members, reduction.dtype
    size = _chunk_bytes(members.num_shards) // dtype.itemsize
    reducer = Reducer(reduction.op, dtype, members.num_shards, size)
    parts = bounds(reduction.length, members.size, dtype.itemsize)
    own = chunks(*parts[members.rank], size)
    theirs = {peer: chunks(*parts[peer], size) for peer in stream.peers}
    weights = _weights(stream, reduction)
    table = np.empty((DEPTH, members.num_shards, min(size, max((b - a for a, b in own), default=0))), dtype)
    wanted = reduction.scatter
    offset = wanted[0] if wanted else 0

    def sums(pieces: Sequence[tuple[int, int]], late: bool) -> list[list[Transfer]]:
        """Of a reduce_scatter, sums stay where they are."""
        gates = [number + 1 if late else 0 for number in range(len(pieces))]
        return [
            [Transfer(target[low:high], gate)]
            for gate, (low, high) in zip(gates, pieces, strict=True)
            if wanted is None
        ]

    out, into, needs = {}, {}, {}
    for peer, pieces in theirs.items():
        sent = [[Transfer(row[low:high]) for row in reduction.rows] for low, high in pieces]
        out[peer] = [*weights[members.rank], *itertools.chain(*_alternate(sent, sums(own, True)))]
        come = [
            [
                Transfer(table[number % DEPTH, shard, : high - low], max(0, number - DEPTH + 1))
                for shard in members.shards[peer]
            ]
            for number, (low, high) in enumerate(own)
        ]
        flow = _alternate(come, sums(pieces, False))
        into[peer] = [*weights[peer], *itertools.chain(*flow)]
        needs[peer] = _complete(flow, come, 1 + len(weights[peer]))
    steps = []
    for number, (low, high) in enumerate(own):
        mine = [row[low:high] for row in reduction.rows]
        rows = _with_own(members, mine, [row[: high - low] for row in table[number % DEPTH]])
        steps.append(
            ScheduleStep(
                rows, target[low - offset : high - offset], {peer: needs[peer][number] for peer in needs}
            )
        )
    return ScheduleRunner(stream, reduction, reducer, Schedule(out, into, _greeting(stream, weights), steps))


def _alternate(rows: Sequence[list[Transfer]], sums: Sequence[list[Transfer]]) -> list[list[Transfer]]:
    """What goes one way between two members: rows of one chunk after the other, and sums some chunks after
    them."""
    order = []
    for turn in range(max(len(rows), len(sums) + _LAG if sums else 0)):
        if turn < len(rows):
            order.append(rows[turn])
        if 0 <= turn - _LAG < len(sums):
            order.append(sums[turn - _LAG])
    return order


def _complete(flow: Sequence[list[Transfer]], rows: Sequence[list[Transfer]], ahead: int) -> list[int]:
    """After how many segments from a peer each of `rows` has come; `ahead` are before the flow."""
    ends = list(itertools.accumulate(map(len, flow), initial=ahead))[1:]
    places = {id(segments): end for segments, end in zip(flow, ends, strict=True)}
    return [places[id(segments)] for segments in rows]


class ChainAllReduce:
    """A running sum goes through all members in shard order, and the result comes back."""

    def __init__(self, stream: TcpSession, reduction: Reduction, target: np.ndarray) -> None:
        size = CHUNK_BYTES // reduction.dtype.itemsize
        members = stream.members
        self.stream = stream
        self.reduction = reduction
        self.reducer = Reducer(reduction.op, reduction.dtype, members.num_shards, size)
        self.text = str(reduction)
        self.mine = members.shards[members.rank]
        order = chain_order(members)
        assert order is not None  # noqa: S101 (chosen only where there is one)
        at = order.index(members.rank)
        self._before = [shard for rank in order[:at] for shard in members.shards[rank]]
        self._previous = order[at - 1] if at else None
        self._next = order[at + 1] if at + 1 < len(order) else None
        self._chunks = chunks(0, reduction.length, size)
        self._target = target
        self._ring = np.empty((DEPTH, min(size, reduction.length)), self.reducer.wide)

    def run(self, weights: Sequence[float] | None) -> bool:
        stream = self.stream
        stream.begin_weighted(self.text, weights)
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
                    factors = coefficients(stream.weights(), self.reduction.dtype)
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


ALGORITHMS: Mapping[str, Callable[[TcpSession, Reduction, np.ndarray], Algorithm]] = {
    "gather": gather,
    "star": star,
    "direct": direct,
    "chain": ChainAllReduce,
}
