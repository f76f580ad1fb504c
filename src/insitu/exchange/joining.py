"""`join`: from a rank and a list of addresses to a group."""

from __future__ import annotations

import contextlib
import os
import select
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import index
from typing import Literal, get_args

from insitu.errors import ExchangeError, InputError
from insitu.exchange import memory
from insitu.exchange.compression import CompressingTransport
from insitu.exchange.group import FormedGroup, Group
from insitu.exchange.handshake import PeerInfo, check_secret
from insitu.exchange.hierarchical import HierarchicalTransport, HostTopology
from insitu.exchange.peer_connections import PeerConnections
from insitu.exchange.rendezvous import Peer, Rendezvous, parse_address
from insitu.exchange.shm import SharedMemoryTransport
from insitu.exchange.shm_barrier import patience
from insitu.exchange.shm_layout import SegmentLayout
from insitu.exchange.solo import SoloTransport
from insitu.exchange.tcp import TcpTransport
from insitu.exchange.transport import GroupConfig, MemberLost, Members, Transport

TransportName = Literal["auto", "shm", "tcp"]
Compression = Literal["none", "bfloat16"]
_AFTER_OTHER_HOSTS = 1.0
"""Seconds."""


def join(
    rank: int,
    addresses: Sequence[str],
    *,
    transport: TransportName = "auto",
    shards: Sequence[int] | None = None,
    num_shards: int | None = None,
    secret: bytes = b"",
    timeout: float = 60.0,
    stall_timeout: float = 600.0,
    tasks: Sequence[str] | None = None,
    generation: int = 0,
    compression: Compression = "none",
    cancelled: Callable[[], bool] = lambda: False,
) -> Group:
    """Meets the other ranks and returns the group.

    `addresses[r]` is the `host:port` that rank r listens on while the group forms; nothing may listen there
    before. `shards` are the shards that this process hosts, ascending (None: shard `rank`), out of
    `num_shards` (None: as many as ranks); the ranks' shards together must be all of them, each once.
    `secret` is proved, never sent. `timeout` bounds the forming, `stall_timeout` every wait afterwards, in
    seconds. `tasks` names the ranks in messages. All ranks must give the same number of addresses,
    `num_shards`, `transport`, `compression` and `generation`; peers of an older generation are refused.

    `transport` "auto" takes shared memory among ranks of one host and TCP between hosts. `compression`
    "bfloat16" halves what float32 reductions send between hosts, and changes their results: see
    `insitu.exchange.compression`. Within one host nothing is compressed. `cancelled` is asked while others
    are waited for, as in `Group.rejoin`.

    Raises InputError, JoinTimeout (naming who is missing), AuthenticationError, StaleGeneration (where this
    process is the old one, or the wait was called off), ExchangeError.
    """
    for name, value, allowed in (
        ("transport", transport, get_args(TransportName)),
        ("compression", compression, get_args(Compression)),
    ):
        if value not in allowed:
            raise InputError(f"{name} must be one of {', '.join(allowed)}. Received: {value!r}")
    check_secret(secret)
    for name, seconds in (("timeout", timeout), ("stall_timeout", stall_timeout)):
        if not seconds > 0:
            raise InputError(f"{name} must be a number of seconds greater than 0. Received: {seconds}")
    rank = index(rank)
    seat = GroupConfig(
        generation,
        rank,
        tuple(addresses),
        (rank,) if shards is None else tuple(map(index, shards)),
        None if tasks is None else tuple(tasks),
    )
    total = len(addresses) if num_shards is None else num_shards
    form = partial(_form, _JoinOptions(total, transport, compression, secret, stall_timeout))
    formed = form(seat, timeout, cancelled)
    return Group(*formed, seat=seat, timeout=timeout, form=form)


@dataclass(frozen=True, slots=True)
class _JoinOptions:
    """What stays the same from one generation of a group to the next."""

    num_shards: int
    transport: TransportName
    compression: Compression
    secret: bytes = field(repr=False)
    stall_timeout: float

    def card(self, seat: GroupConfig) -> PeerInfo:
        return {
            "rank": seat.rank,
            "size": len(seat.addresses),
            "num_shards": self.num_shards,
            "shards": list(seat.shards),
            "transport": self.transport,
            "compression": self.compression,
            "process": os.getpid(),
            "processors": sorted(os.sched_getaffinity(0)),
            "generation": seat.generation,
        }


def _form(
    terms: _JoinOptions, seat: GroupConfig, timeout: float, cancelled: Callable[[], bool]
) -> FormedGroup:
    """Meets all others, unless `cancelled`."""
    _check(seat, terms.num_shards)
    card, size = terms.card(seat), len(seat.addresses)
    if size == 1:
        members = _members([card], 0)
        return members, SoloTransport(members), lambda: None
    control = memory.create("insitu-exchange", SegmentLayout(size, terms.num_shards).size)
    try:
        card |= {"control": control, "host": memory.host_identity() if memory.supported() else ""}
        with Rendezvous(seat, card, partial(_compare, card), terms.secret, timeout, cancelled) as meeting:
            peers = meeting.meet(range(size), "control")
            cards = [card if r == seat.rank else peers[r].card for r in range(size)]
            members = _members(cards, seat.rank)
            hosts = _hosts(members, cards)
            lives = _watch_lives(hosts, cards, peers)
            with contextlib.ExitStack() as undo:
                undo.callback(lives.close)
                try:
                    transport = _form_transport(hosts, cards, meeting, peers, lives, terms.stall_timeout)
                except MemberLost as gone:
                    if not meeting.remaining:
                        raise meeting.late([gone.rank]) from gone
                    text = f"{seat.name(gone.rank)} {gone.why} while the group was forming"
                    raise ExchangeError(text) from gone
                undo.pop_all()
            return members, transport, lives.close
    finally:
        os.close(control)


def _check(seat: GroupConfig, num_shards: int) -> None:
    """Raises InputError."""
    size = len(seat.addresses)
    if not 0 <= seat.rank < size:
        raise InputError(f"rank must be in [0, {size}), the addresses given. Received: {seat.rank}")
    for address in seat.addresses:
        parse_address(address)
    if seat.tasks is not None and len(seat.tasks) != size:
        raise InputError(f"tasks must name each of the {size} ranks. Received: {len(seat.tasks)} names")
    hosted = seat.shards
    if list(hosted) != sorted(set(hosted)) or any(not 0 <= s < num_shards for s in hosted):
        raise InputError(f"shards must be distinct, ascending and in [0, {num_shards}). Received: {hosted}")


def _compare(mine: PeerInfo, theirs: PeerInfo) -> None:
    """Raises ExchangeError unless both can be in one group."""
    for key in ("size", "num_shards", "transport", "compression"):
        if mine[key] != theirs.get(key):
            raise ExchangeError(
                f"All ranks must join with the same {key}. Rank {mine['rank']} has {mine[key]!r}, "
                f"rank {theirs.get('rank')} has {theirs.get(key)!r}"
            )


def _members(cards: Sequence[PeerInfo], rank: int) -> Members:
    """Raises ExchangeError unless each shard is hosted once."""
    shards = tuple(tuple(int(s) for s in card["shards"]) for card in cards)
    total = cards[rank]["num_shards"]
    if sorted(s for hosted in shards for s in hosted) != list(range(total)):
        raise ExchangeError(
            f"The ranks together must host each of the {total} shards once. Received: {shards}"
        )
    return Members(rank, shards, total)


class _LivenessWatch:
    """Watches connections: a process that ends, however it ends, closes them. Nothing is sent on them. Of
    `processes` on this host, by rank, also the process ids: a connection may be cut without telling."""

    def __init__(self, peers: dict[int, Peer], processes: dict[int, int]) -> None:
        self._poll = select.poll()
        self._ranks: dict[int, int] = {}
        self._connections = [peer.connection for peer in peers.values()]
        self._processes: list[int] = []
        for peer in peers.values():
            self._ranks[peer.connection.fileno()] = peer.rank
            self._poll.register(peer.connection, select.POLLIN | select.POLLRDHUP)
        for rank, process in processes.items():
            # One that has ended already has closed its connection, too.
            with contextlib.suppress(OSError):
                watched = os.pidfd_open(process)
                self._processes.append(watched)
                self._ranks[watched] = rank
                self._poll.register(watched, select.POLLIN)

    def dead(self, ranks: Sequence[int]) -> list[int]:
        """Those of `ranks` whose process or connection has ended."""
        ended = {self._ranks[file] for file, _ in self._poll.poll(0)}
        return [rank for rank in ranks if rank in ended]

    def close(self) -> None:
        for connection in self._connections:
            connection.close()
        for process in self._processes:
            os.close(process)
        self._processes.clear()


def _hosts(members: Members, cards: Sequence[PeerInfo]) -> HostTopology:
    """Ranks by host. Raises ExchangeError where all must share one and don't."""
    wanted = cards[0]["transport"]
    by_host: dict[str, list[int]] = {}
    for rank, card in enumerate(cards):
        alone = wanted == "tcp" or not card["host"]
        by_host.setdefault(f"rank {rank}" if alone else str(card["host"]), []).append(rank)
    if wanted == "shm" and len(by_host) > 1:
        raise ExchangeError(
            f'transport="shm" needs all ranks on one x86-64 Linux host, as one user, who see each other\'s '
            f"processes. Received ranks on: {sorted(by_host)}"
        )
    return HostTopology(members, tuple(tuple(ranks) for ranks in by_host.values()))


def _lane(hosts: HostTopology) -> Sequence[int]:
    """The ranks, one on each host, with which this one moves data between hosts."""
    return hosts.lane(hosts.position) if hosts.position < hosts.lanes else ()


def _watch_lives(hosts: HostTopology, cards: Sequence[PeerInfo], peers: dict[int, Peer]) -> _LivenessWatch:
    neighbours, lane = hosts.ranks[hosts.here], _lane(hosts)
    return _LivenessWatch(
        {rank: peer for rank, peer in peers.items() if rank not in lane or rank in neighbours},
        {rank: int(cards[rank]["process"]) for rank in neighbours if rank != hosts.members.rank},
    )


def _form_transport(
    hosts: HostTopology,
    cards: Sequence[PeerInfo],
    meeting: Rendezvous,
    peers: dict[int, Peer],
    lives: _LivenessWatch,
    stall_timeout: float,
) -> Transport:
    here = hosts.members.rank
    neighbours, lane = hosts.ranks[hosts.here], _lane(hosts)
    wire: TcpTransport | None = None
    same_host = [card for card in cards if card["host"] == cards[here]["host"]]
    if len(hosts.ranks) > 1 and lane:
        data = {rank: peer.connection for rank, peer in meeting.meet(lane, "data").items()}
        control = {rank: peers[rank].connection for rank in data}
        threads = len({card["process"] for card in same_host}) < len(same_host)
        soon = min(stall_timeout, meeting.remaining)
        links = PeerConnections(here, control, data, soon, _crowded(same_host), threads)
        wire = TcpTransport(hosts.between(), links, lane, cards[0]["generation"])
        links.stall_timeout = stall_timeout
    compress = CompressingTransport if cards[0]["compression"] != "none" else _as_it_is
    if wire is not None and all(len(ranks) == 1 for ranks in hosts.ranks):
        return compress(wire)
    soon = min(stall_timeout, meeting.remaining)
    shared = _form_shared(hosts, [cards[rank] for rank in neighbours], lives, soon)
    if len(hosts.ranks) == 1:
        shared.wait_at_most(stall_timeout)
        return shared
    # Who seems stuck here may wait for another host, where the one that is stuck is found first.
    shared.wait_at_most(stall_timeout + _AFTER_OTHER_HOSTS)
    return compress(HierarchicalTransport(hosts, shared, wire))


def _as_it_is(transport: Transport) -> Transport:
    return transport


def _crowded(cards: Sequence[PeerInfo]) -> bool:
    """Whether ranks of one host are more than the processors that they may use together, so that who spins
    takes the time of those it waits for."""
    return len(cards) > len({processor for card in cards for processor in card["processors"]})


def _form_shared(
    hosts: HostTopology, cards: Sequence[PeerInfo], lives: _LivenessWatch, stall_timeout: float
) -> SharedMemoryTransport:
    leader = cards[0]
    size = SegmentLayout(leader["size"], leader["num_shards"]).size
    control = memory.attach(leader["process"], leader["control"], size)
    same_process = len({card["process"] for card in cards}) < len(cards)
    how = patience(len(cards), _crowded(cards), same_process)
    ranks = hosts.ranks[hosts.here]
    neighbours = [rank for rank in ranks if rank != hosts.members.rank]
    shared = SharedMemoryTransport(
        hosts.within(), control, ranks, how, lambda: lives.dead(neighbours), stall_timeout
    )
    shared.allocate(0)  # everybody has mapped the leader's segment once this returns
    return shared
