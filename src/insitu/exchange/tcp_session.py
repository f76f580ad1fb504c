"""Runs one operation after another over a member's connections: headers, weights, and agreement."""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from insitu.exchange import native
from insitu.exchange.peer_connections import DataChannel, PeerConnections, PendingTransfers
from insitu.exchange.plan import Members, Mismatch, WaitStats, mismatch_error

_HEADER = struct.Struct("!IQ148s")
"""Generation, number and label of an operation."""
_CONTROL_INTERVAL = 16
"""Operations after which control frames are read, also by a member that never waits."""


def as_bytes(array: np.ndarray) -> memoryview:
    """Return the bytes of a contiguous array."""
    return memoryview(array.reshape(-1).view(np.uint8))  # type: ignore[arg-type]


class TcpSession:
    """One member's operations over TCP, for one generation of the group.

    Each operation begins with a header from each member to each other. A peer whose header differs has called
    another operation.
    """

    def __init__(
        self, members: Members, connections: PeerConnections, ranks: Sequence[int], generation: int
    ) -> None:
        """`ranks` are the members' ranks in the group, by which `connections` names them."""
        self.members = members
        #: The other members.
        self.peers = [member for member in range(members.size) if member != members.rank]
        self._channels = {member: connections.channels[ranks[member]] for member in self.peers}
        self._all_channels = list(self._channels.values())
        self._ranks = ranks
        #: How long this process has waited for others.
        self.wait_stats = WaitStats()
        #: By peer: the number of buffers that precede the data of the operation under way.
        self.preamble = dict.fromkeys(self.peers, 0)
        self._connections = connections
        self._generation = generation
        #: Number of the last operation that began.
        self.sequence = 0
        self._header = b""
        self._headers = {peer: bytearray(_HEADER.size) for peer in self.peers}
        #: The weights of all shards, member after member; see `get_weights`.
        self.weights_table = np.zeros(members.num_shards)
        self._starts = [0]
        for shards in members.shards:
            self._starts.append(self._starts[-1] + len(shards))
        self._unchecked: list[int] = []
        #: The compiled functions; None: connections are encrypted, so Python moves the bytes.
        self.kernels = None if connections.encrypted else native.load_kernels()
        #: See PeerConnections.
        self.poll_limit = connections.poll_limit
        #: True if some members are threads of one process.
        self.threads = connections.threads

    def channel(self, peer: int) -> DataChannel:
        """Return the data channel to a peer."""
        return self._channels[peer]

    def get_rank(self, member: int) -> int:
        """Return a member's rank in the group."""
        return self._ranks[member]

    def get_weights(self, member: int) -> np.ndarray:
        """Return the memory for the weights of a member's shards: float64, in their order."""
        return self.weights_table[self._starts[member] : self._starts[member + 1]]

    def collect_weights(self) -> list[float]:
        """Return all shards' weights in shard order, once all have agreed."""
        values = [0.0] * self.members.num_shards
        for member, shards in enumerate(self.members.shards):
            for shard, weight in zip(shards, self.get_weights(member).tolist(), strict=True):
                values[shard] = weight
        return values

    # Headers

    def _pack_header(self, label: str) -> bytes:
        return _HEADER.pack(self._generation, self.sequence, label.encode()[:148])

    def make_headers(self, label: str, peers: Sequence[int]) -> tuple[np.ndarray, list[np.ndarray]]:
        """Return (this member's header, memory for those of `peers`) for an operation that is run many times.
        Compiled code fills in its number."""
        own = np.frombuffer(self._pack_header(label), np.uint8).copy()
        return own, [np.zeros_like(own) for _ in peers]

    def next_sequence(self) -> int:
        """Return the number of the operation that begins now."""
        self.sequence += 1
        if not self.sequence % _CONTROL_INTERVAL:
            self._connections.read_control()
        return self.sequence

    def begin(self, label: str, preamble: Mapping[int, int] | None = None) -> None:
        """Queue this member's header, and the receipt of that of each peer.

        `preamble`: the peers that take part, and the number of buffers from each that precede the data; None:
        all peers, and the header only.
        """
        self.next_sequence()
        self.wait_stats.last_rank = self._ranks[self.members.rank]
        self._header = self._pack_header(label)
        preamble = preamble if preamble is not None else dict.fromkeys(self.peers, 1)
        self._unchecked = list(preamble)
        for channel in self._all_channels:
            channel.reset_counts()
        for peer, count in preamble.items():
            self.channel(peer).send(memoryview(self._header))
            self.channel(peer).receive(memoryview(self._headers[peer]))
            self.preamble[peer] = count

    def begin_weighted(self, label: str, weights: Sequence[float] | None) -> None:
        """Queue the headers, and the weights if there are any."""
        own = self.get_weights(self.members.rank)
        if weights is None:
            return self.begin(label)
        own[:] = weights
        self.begin(label, {peer: 1 + bool(self.members.shards[peer]) for peer in self.peers})
        for peer in self.peers:
            if own.size:
                self.channel(peer).send(as_bytes(own))
            if self.members.shards[peer]:
                self.channel(peer).receive(as_bytes(self.get_weights(peer)))

    def have_agreed(self) -> bool:
        """Return True once the headers (and weights) of all peers have arrived. Raise Mismatch if one
        differs."""
        if self._unchecked:
            waiting = []
            for peer in self._unchecked:
                received = self.channel(peer).received
                if received and self._headers[peer] != self._header:
                    raise self.report_mismatch(peer, self._header, bytes(self._headers[peer]))
                if received < self.preamble[peer]:
                    waiting.append(peer)
            if len(waiting) < len(self._unchecked) and not waiting:
                self.wait_stats.last_rank = self._ranks[self._unchecked[-1]]
            self._unchecked = waiting
        return not self._unchecked

    def report_mismatch(self, peer: int, own: bytes, other: bytes) -> Mismatch:
        """Report to all others that the header of a peer differs, and return the error to raise."""
        mine, theirs = (
            _HEADER.unpack(header)[2].rstrip(b"\0").decode(errors="replace") for header in (own, other)
        )
        self._connections.report_mismatch(self._ranks[peer])
        return mismatch_error(self._ranks[self.members.rank], mine, self._ranks[peer], theirs)

    # Transfers

    def is_idle(self) -> bool:
        """Return True if all that was queued has been sent and received."""
        for channel in self._all_channels:  # noqa: SIM110 (called after every transfer: a loop is fastest)
            if channel.outgoing or channel.incoming:
                return False
        return True

    def is_complete(self) -> bool:
        """Return True if all have agreed and nothing is queued: the end of an operation that only copies."""
        if self._unchecked and not self.have_agreed():
            return False
        return self.is_idle()

    def run_until(self, advance: Callable[[], bool]) -> None:
        """Send and receive until `advance`, called after every transfer, returns True. Raises MemberLost."""
        before = self._connections.waited
        try:
            self._connections.run_until(advance)
        finally:
            self.wait_stats.seconds += self._connections.waited - before

    def sleep_until(
        self, pending: Mapping[int, PendingTransfers], resume: Callable[[], tuple[bool, bool]]
    ) -> None:
        """See PeerConnections; `pending` goes by member here."""
        before = self._connections.waited
        try:
            self._connections.sleep_until({self._ranks[peer]: p for peer, p in pending.items()}, resume)
        finally:
            self.wait_stats.seconds += self._connections.waited - before

    # Loss

    def report_waiting_for(self, rank: int) -> None:
        """Report to the peers that this member waits for `rank`, to which it has no connection."""
        self._connections.report_waiting_for(rank)

    def report_lost(self, rank: int) -> None:
        """Report to the peers that `rank`, on this host, was lost."""
        self._connections.report_lost(rank, "was lost")

    def close(self) -> None:
        """Report to the peers that this member leaves, and close all connections."""
        self._connections.close()
