"""Four algorithms to reduce over TCP, all with the one order of summation. See `costs` for when each is best.

Each is prepared once for its rows and run many times. `target` is memory for the whole result. If it is the
caller's own, nothing is written to it before the result is complete.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import numpy as np

from insitu.exchange.plan import (
    Factors,
    Members,
    Reducer,
    Reduction,
    Schedule,
    ScheduleStep,
    Transfer,
    compute_factors,
    find_chain_order,
    find_hub,
    split_by_pages,
    split_chunks,
)
from insitu.exchange.schedule_runner import ScheduleRunner
from insitu.exchange.tcp_session import TcpSession, as_bytes

CHUNK_BYTES = 256 * 1024
DEPTH = 4
"""Chunks that may be under way between two members before they are summed. So many of them fit into the
second-level cache: a chunk is still there when it is summed after it was received, and a sum when it is
sent."""
_LEAD = 2
"""Chunks of rows that are sent ahead of the sums."""
_STAR_CHUNK_BYTES = _MIN_CHUNK_BYTES = 64 * 1024


def _choose_chunk_bytes(shards: int) -> int:
    """Return the bytes of a chunk of each of so many rows, such that the chunks under way stay in the
    cache."""
    return max(_MIN_CHUNK_BYTES, min(CHUNK_BYTES, 2 * CHUNK_BYTES // shards))


class Algorithm(Protocol):
    """A reduction that is prepared to be run many times."""

    def run(self, weights: Sequence[float] | None) -> bool:
        """Reduce. Return False if all weights were 0; then the target is undefined."""


def _make_weight_transfers(session: TcpSession, reduction: Reduction) -> dict[int, list[Transfer]]:
    """Return the transfer of each member's weights, which precedes its rows."""
    if reduction.op != "weighted_mean":
        return {member: [] for member in range(session.members.size)}
    return {
        member: [Transfer(session.get_weights(member))] if shards else []
        for member, shards in enumerate(session.members.shards)
    }


def _count_preamble(session: TcpSession, weights: Mapping[int, Sequence[Transfer]]) -> dict[int, int]:
    return {peer: 1 + len(weights[peer]) for peer in session.peers}


def _with_own(members: Members, own: Sequence[np.ndarray], others: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Return all shards' rows: `own` for those hosted here, and those of `others`, by shard, for the rest."""
    rows = list(others)
    for shard, row in zip(members.shards[members.rank], own, strict=True):
        rows[shard] = row
    return rows


def make_gather(session: TcpSession, reduction: Reduction, target: np.ndarray) -> Algorithm:
    """Prepare "gather": each member sends its rows to each other."""
    members, length, dtype = session.members, reduction.length, reduction.dtype
    reducer = Reducer(reduction.op, dtype, members.num_shards, length)
    rows = _with_own(members, reduction.rows, list(np.empty((members.num_shards, length), dtype)))
    weights = _make_weight_transfers(session, reduction)
    full = bool(length)
    sends = [*weights[members.rank], *(Transfer(row) for row in reduction.rows if full)]
    receives = {
        peer: [*weights[peer], *(Transfer(rows[shard]) for shard in members.shards[peer] if full)]
        for peer in session.peers
    }
    start, stop = reduction.scatter or (0, length)
    separate = _overwrites_own_row(session, reduction, reducer, target)
    total = np.empty_like(target) if separate else target
    summands = [row[start:stop] for row in rows]
    step = ScheduleStep(summands, total, {peer: 1 + len(queue) for peer, queue in receives.items()})
    schedule = Schedule(
        dict.fromkeys(session.peers, sends),
        receives,
        _count_preamble(session, weights),
        [step] if stop > start else [],
        in_place=not separate,
        copy_at_end=(total, target) if separate else None,
    )
    return ScheduleRunner(session, reduction, reducer, schedule)


def _overwrites_own_row(
    session: TcpSession, reduction: Reduction, reducer: Reducer, target: np.ndarray
) -> bool:
    """Return True if `target` is this member's first row and summing to it would change the row too early."""
    own = session.members.shards[session.members.rank]
    if not own or not np.shares_memory(reduction.rows[0], target):
        return False
    added_first = own[0] == 0 or (own[0] == 1 and reduction.op != "weighted_mean")
    return not added_first and reducer.sum_dtype is reduction.dtype


def make_star(session: TcpSession, reduction: Reduction, target: np.ndarray) -> Algorithm:
    """Prepare "star": one member, the hub, receives all rows and sends the sums to all."""
    if not reduction.length:  # the hub answers once it has summed something
        return make_gather(session, reduction, target)
    members, dtype = session.members, reduction.dtype
    hub = find_hub(members)
    size = _STAR_CHUNK_BYTES // dtype.itemsize
    reducer = Reducer(reduction.op, dtype, members.num_shards, size)
    chunks = split_chunks(0, reduction.length, size)
    weights = _make_weight_transfers(session, reduction)
    all_weights = [Transfer(session.weights_table, 1)] if reduction.op == "weighted_mean" else []
    # A result that replaces the rows is computed elsewhere: a loss leaves the rows as they were.
    total = np.empty_like(target) if np.shares_memory(target, reduction.result) else target
    sums = [Transfer(total[low:high], number + 1) for number, (low, high) in enumerate(chunks)]
    copy = None if total is target else (total, target)
    if members.rank != hub:
        rows = [Transfer(row[low:high]) for low, high in chunks for row in reduction.rows]
        answers = [Transfer(transfer.data) for transfer in (*all_weights, *sums)]
        sends, receives = {hub: [*weights[members.rank], *rows]}, {hub: answers}
        schedule = Schedule(sends, receives, {hub: 1}, copy_at_end=copy)
        return ScheduleRunner(session, reduction, reducer, schedule)
    table = np.empty((members.num_shards, reduction.length), dtype)
    rows_of = {peer: [table[shard] for shard in members.shards[peer]] for peer in session.peers}
    summands = _with_own(members, reduction.rows, list(table))
    preamble = _count_preamble(session, weights)
    schedule = Schedule(
        {peer: [*all_weights, *sums] for peer in session.peers},
        {
            peer: [*weights[peer], *(Transfer(row[low:high]) for low, high in chunks for row in rows)]
            for peer, rows in rows_of.items()
        },
        preamble,
        [
            ScheduleStep(
                [row[low:high] for row in summands],
                total[low:high],
                {peer: preamble[peer] + (number + 1) * len(rows) for peer, rows in rows_of.items()},
            )
            for number, (low, high) in enumerate(chunks)
        ],
        delay_header=True,
        copy_at_end=copy,
    )
    return ScheduleRunner(session, reduction, reducer, schedule)


def make_direct(session: TcpSession, reduction: Reduction, target: np.ndarray) -> Algorithm:
    """Prepare "direct": each member sums one part of the length for all.

    Messages to a peer alternate: rows of a chunk of the peer's part, then the sum of an earlier chunk of
    this member's, which is still in the processor's cache.
    """
    members, dtype = session.members, reduction.dtype
    size = _choose_chunk_bytes(members.num_shards) // dtype.itemsize
    reducer = Reducer(reduction.op, dtype, members.num_shards, size)
    parts = split_by_pages(reduction.length, members.size, dtype.itemsize)
    own = split_chunks(*parts[members.rank], size)
    theirs = {peer: split_chunks(*parts[peer], size) for peer in session.peers}
    weights = _make_weight_transfers(session, reduction)
    table = np.empty((DEPTH, members.num_shards, min(size, max((b - a for a, b in own), default=0))), dtype)
    scatter = reduction.scatter
    offset = scatter[0] if scatter else 0

    def make_sums(chunks: Sequence[tuple[int, int]], gated: bool) -> list[list[Transfer]]:
        """Return the transfers of the sums. Those of a reduce_scatter stay where they are."""
        gates = [number + 1 if gated else 0 for number in range(len(chunks))]
        return [
            [Transfer(target[low:high], gate)]
            for gate, (low, high) in zip(gates, chunks, strict=True)
            if scatter is None
        ]

    sends, receives, needs = {}, {}, {}
    for peer, chunks in theirs.items():
        sent = [[Transfer(row[low:high]) for row in reduction.rows] for low, high in chunks]
        sends[peer] = [*weights[members.rank], *itertools.chain(*_interleave(sent, make_sums(own, True)))]
        received = [
            [
                Transfer(table[number % DEPTH, shard, : high - low], max(0, number - DEPTH + 1))
                for shard in members.shards[peer]
            ]
            for number, (low, high) in enumerate(own)
        ]
        groups = _interleave(received, make_sums(chunks, False))
        receives[peer] = [*weights[peer], *itertools.chain(*groups)]
        needs[peer] = _count_until(groups, received, 1 + len(weights[peer]))
    steps = []
    for number, (low, high) in enumerate(own):
        mine = [row[low:high] for row in reduction.rows]
        rows = _with_own(members, mine, [row[: high - low] for row in table[number % DEPTH]])
        steps.append(
            ScheduleStep(
                rows, target[low - offset : high - offset], {peer: needs[peer][number] for peer in needs}
            )
        )
    schedule = Schedule(sends, receives, _count_preamble(session, weights), steps)
    return ScheduleRunner(session, reduction, reducer, schedule)


def _interleave(rows: Sequence[list[Transfer]], sums: Sequence[list[Transfer]]) -> list[list[Transfer]]:
    """Return the order of what one member sends to another: the rows of one chunk after the other, and the
    sums some chunks after them."""
    order = []
    for turn in range(max(len(rows), len(sums) + _LEAD if sums else 0)):
        if turn < len(rows):
            order.append(rows[turn])
        if 0 <= turn - _LEAD < len(sums):
            order.append(sums[turn - _LEAD])
    return order


def _count_until(groups: Sequence[list[Transfer]], rows: Sequence[list[Transfer]], first: int) -> list[int]:
    """Return for each of `rows`, which are some of `groups`, the number of transfers after which it is
    complete. `first` transfers precede the groups."""
    ends = list(itertools.accumulate(map(len, groups), initial=first))[1:]
    end_of = {id(transfers): end for transfers, end in zip(groups, ends, strict=True)}
    return [end_of[id(transfers)] for transfers in rows]


class ChainReduction:
    """The "chain" algorithm: a running sum passes through all members in shard order, and the result comes
    back."""

    def __init__(self, session: TcpSession, reduction: Reduction, target: np.ndarray) -> None:
        size = CHUNK_BYTES // reduction.dtype.itemsize
        members = session.members
        self._session = session
        self._reduction = reduction
        self._reducer = Reducer(reduction.op, reduction.dtype, members.num_shards, size)
        self._label = str(reduction)
        self._own_shards = members.shards[members.rank]
        order = find_chain_order(members)
        assert order is not None  # noqa: S101 (chosen only if there is one)
        at = order.index(members.rank)
        self._shards_before = [shard for rank in order[:at] for shard in members.shards[rank]]
        self._previous = order[at - 1] if at else None
        self._next = order[at + 1] if at + 1 < len(order) else None
        self._chunks = split_chunks(0, reduction.length, size)
        self._target = target
        self._ring = np.empty((DEPTH, min(size, reduction.length)), self._reducer.sum_dtype)

    def run(self, weights: Sequence[float] | None) -> bool:
        """See Algorithm."""
        session = self._session
        session.begin_weighted(self._label, weights)
        factors: Factors | None = None
        defined = True
        agreed = False
        requested = summed = returned = 0
        if self._next is not None:
            for low, high in self._chunks:
                session.channel(self._next).receive(as_bytes(self._target[low:high]))

        def advance() -> bool:
            nonlocal factors, defined, agreed, requested, summed, returned
            if not agreed and session.have_agreed():
                agreed = True
                if weights is not None:
                    factors = compute_factors(session.collect_weights(), self._reduction.dtype)
                    defined = factors is not None
            requested = self._request_sums(requested, self._count_startable(summed))
            while agreed and summed < self._count_startable(summed) and self._has_received(summed):
                self._sum(summed, factors, defined)
                summed += 1
            returned = self._return_results(returned)
            done = agreed and summed == len(self._chunks) and session.is_idle()
            return done and self._has_returned_all(returned)

        session.run_until(advance)
        return defined

    def _count_startable(self, summed: int) -> int:
        """Return the number of chunks that may be begun: the ring holds sums that are not yet sent."""
        done = (
            summed
            if self._next is None
            else self._session.channel(self._next).sent - self._count_sent_before(self._next)
        )
        return min(len(self._chunks), max(0, done) + DEPTH)

    def _count_sent_before(self, peer: int) -> int:
        """Return the number of buffers that precede the sums to a peer: the header, and the weights."""
        return 1 + (1 if self._reduction.op == "weighted_mean" and self._own_shards else 0)

    def _request_sums(self, requested: int, startable: int) -> int:
        """Queue the receipt of the previous member's sums; return the number of all that are queued."""
        if self._previous is not None:
            while requested < startable:
                low, high = self._chunks[requested]
                place = self._ring[requested % DEPTH][: high - low]
                self._session.channel(self._previous).receive(as_bytes(place))
                requested += 1
        return requested

    def _has_received(self, number: int) -> bool:
        """Return True if the previous member's sum of a chunk has arrived."""
        peer, session = self._previous, self._session
        return peer is None or session.channel(peer).received > session.preamble[peer] + number

    def _sum(self, number: int, factors: Factors | None, defined: bool) -> None:
        """Add this member's rows to a chunk and pass it on."""
        low, high = self._chunks[number]
        total = self._ring[number % DEPTH][: high - low]
        if defined:
            own = None if factors is None else [factors[shard] for shard in self._own_shards]
            empty = not any(factors is None or factors[shard] != 0 for shard in self._shards_before)
            self._reducer.accumulate(total, [row[low:high] for row in self._reduction.rows], own, empty)
        if self._next is not None:
            self._session.channel(self._next).send(as_bytes(total))
        else:
            out = self._target[low:high]
            if defined:
                self._reducer.finish(total, out)
            if self._previous is not None:
                self._session.channel(self._previous).send(as_bytes(out))

    def _return_results(self, returned: int) -> int:
        """Send the results of the next member on to the previous one; return the number of all that are
        sent."""
        if self._next is not None and self._previous is not None:
            received = self._session.channel(self._next).received - self._session.preamble[self._next]
            while returned < received:
                low, high = self._chunks[returned]
                self._session.channel(self._previous).send(as_bytes(self._target[low:high]))
                returned += 1
        return returned

    def _has_returned_all(self, returned: int) -> bool:
        return self._next is None or self._previous is None or returned == len(self._chunks)


ALGORITHMS: Mapping[str, Callable[[TcpSession, Reduction, np.ndarray], Algorithm]] = {
    "gather": make_gather,
    "star": make_star,
    "direct": make_direct,
    "chain": ChainReduction,
}
"""How to prepare each algorithm, by its name in `costs`."""
