"""One operation after the other over a member's links: headers, weights, and agreement on what is done."""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from insitu.exchange import native
from insitu.exchange.peer_connections import DataChannel, PeerConnections, PendingTransfers
from insitu.exchange.transport import Members, Mismatch, WaitStats

_HEADER = struct.Struct("!IQ148s")
"""Generation, number and text of an operation."""
_SELDOM = 16
"""Operations after which what peers said beside them is read, also by a member that never waits."""


def as_bytes(array: np.ndarray) -> memoryview:
    """The bytes of a contiguous array."""
    return memoryview(array.reshape(-1).view(np.uint8))  # type: ignore[arg-type]


class TcpSession:
    """What comes before the data of each operation."""

    def __init__(
        self, members: Members, links: PeerConnections, ranks: Sequence[int], generation: int
    ) -> None:
        """`ranks` are the ranks in the group, by which `links` goes, of the members."""
        self.members = members
        self.peers = [member for member in range(members.size) if member != members.rank]
        self._channels = {member: links.channels[ranks[member]] for member in self.peers}
        self._every = list(self._channels.values())
        self._ranks = ranks
        self.account = WaitStats()
        self.ahead = dict.fromkeys(self.peers, 0)
        """Buffers that come from each peer before the data of the operation under way."""
        self._links = links
        self._generation = generation
        self.sequence = 0
        """Number of the last operation that began."""
        self._header = b""
        self._headers = {peer: bytearray(_HEADER.size) for peer in self.peers}
        self.weights_table = np.zeros(members.num_shards)
        """Of all shards, member after member; see `weights_of`."""
        self._starts = [0]
        for shards in members.shards:
            self._starts.append(self._starts[-1] + len(shards))
        self._unchecked: list[int] = []
        self.kernels = native.kernels()
        self.looks = links.looks
        self.threads = links.threads

    def channel(self, peer: int) -> DataChannel:
        return self._channels[peer]

    def rank_of(self, member: int) -> int:
        """In the group."""
        return self._ranks[member]

    def weights_of(self, member: int) -> np.ndarray:
        """Where the weights of a member's shards are: float64, in their order."""
        return self.weights_table[self._starts[member] : self._starts[member + 1]]

    def _pack(self, text: str) -> bytes:
        return _HEADER.pack(self._generation, self.sequence, text.encode()[:148])

    def new_headers(self, text: str, peers: Sequence[int]) -> tuple[np.ndarray, list[np.ndarray]]:
        """Of an operation that is done again and again: this member's, but for its number, and room for those
        of `peers`."""
        own = np.frombuffer(self._pack(text), np.uint8).copy()
        return own, [np.zeros_like(own) for _ in peers]

    def count(self) -> int:
        """The number of the operation that begins now."""
        self.sequence += 1
        if not self.sequence % _SELDOM:
            self._links.listen()
        return self.sequence

    def begin(self, text: str, greeting: Mapping[int, int] | None = None) -> None:
        """Queues this member's header, and room for that of each peer. `greeting`: of these only, and after
        how many buffers each of them is ready for the operation."""
        self.count()
        self.account.last = self._ranks[self.members.rank]
        self._header = self._pack(text)
        greeting = greeting if greeting is not None else dict.fromkeys(self.peers, 1)
        self._unchecked = list(greeting)
        for channel in self._every:
            channel.restart()
        for peer, count in greeting.items():
            self.channel(peer).send(memoryview(self._header))
            self.channel(peer).receive(memoryview(self._headers[peer]))
            self.ahead[peer] = count

    def begin_weighted(self, text: str, weights: Sequence[float] | None) -> None:
        """Headers, and the weights where there are any."""
        own = self.weights_of(self.members.rank)
        if weights is None:
            return self.begin(text)
        own[:] = weights
        self.begin(text, {peer: 1 + bool(self.members.shards[peer]) for peer in self.peers})
        for peer in self.peers:
            if own.size:
                self.channel(peer).send(as_bytes(own))
            if self.members.shards[peer]:
                self.channel(peer).receive(as_bytes(self.weights_of(peer)))

    def agreed(self) -> bool:
        """Whether the headers (and weights) of all peers have come. Raises Mismatch where one differs."""
        if self._unchecked:
            waiting = []
            for peer in self._unchecked:
                came = self.channel(peer).received
                if came and self._headers[peer] != self._header:
                    raise self.mismatch(peer, self._header, bytes(self._headers[peer]))
                if came < self.ahead[peer]:
                    waiting.append(peer)
            if len(waiting) < len(self._unchecked) and not waiting:
                self.account.last = self._ranks[self._unchecked[-1]]
            self._unchecked = waiting
        return not self._unchecked

    def mismatch(self, peer: int, own: bytes, other: bytes) -> Mismatch:
        """What to raise where the header of a peer differs, which the others are told, too."""
        mine, theirs = (
            _HEADER.unpack(header)[2].rstrip(b"\0").decode(errors="replace") for header in (own, other)
        )
        self._links.tell_different(self._ranks[peer])
        return Mismatch(
            f"All ranks must call the same operations in the same order, with the same sizes and dtypes. "
            f"Rank {self._ranks[self.members.rank]} called {mine}, rank {self._ranks[peer]} called {theirs}"
        )

    def weights(self) -> list[float]:
        """All shards' weights, once agreed."""
        values = [0.0] * self.members.num_shards
        for member, shards in enumerate(self.members.shards):
            for shard, weight in zip(shards, self.weights_of(member).tolist(), strict=True):
                values[shard] = weight
        return values

    def idle(self) -> bool:
        """Whether all that was queued has been sent and has come."""
        for channel in self._every:  # noqa: SIM110 (asked after every move: a loop is fastest)
            if channel.out or channel.into:
                return False
        return True

    def settled(self) -> bool:
        """Both: all there is to an operation that only copies."""
        if self._unchecked and not self.agreed():
            return False
        return self.idle()

    def pump(self, step: Callable[[], bool]) -> None:
        """Moves bytes until `step` returns True. Raises MemberLost."""
        before = self._links.waited
        try:
            self._links.pump(step)
        finally:
            self.account.waiting += self._links.waited - before

    def attend(self, flows: Mapping[int, PendingTransfers], move: Callable[[], tuple[bool, bool]]) -> None:
        """Sleeps until something can be moved, again and again, until `move` says that it is through with
        waiting; it also says whether it moved anything. `flows`: what is under way with each peer."""
        before = self._links.waited
        try:
            self._links.attend({self._ranks[peer]: flow for peer, flow in flows.items()}, move)
        finally:
            self.account.waiting += self._links.waited - before

    def await_elsewhere(self, rank: int) -> None:
        """Lets the peers know whom this member waits for meanwhile."""
        self._links.await_elsewhere(rank)

    def tell_lost(self, rank: int) -> None:
        self._links.lose(rank, "was lost")

    def close(self) -> None:
        self._links.close()
