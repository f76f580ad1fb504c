"""One operation after the other over a member's links: headers, weights, and agreement on what is done."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence

import numpy as np

from insitu.exchange.links import Channel, Links
from insitu.exchange.transport import Account, Members, Mismatch

_HEADER = struct.Struct("!IQ148s")
"""Generation, number and text of an operation."""


def as_bytes(array: np.ndarray) -> memoryview:
    """The bytes of a contiguous array."""
    return memoryview(array.reshape(-1).view(np.uint8))  # type: ignore[arg-type]


class Stream:
    """What comes before the data of each operation."""

    def __init__(self, members: Members, links: Links, ranks: Sequence[int], generation: int) -> None:
        """`ranks` are the ranks in the group, by which `links` goes, of the members."""
        self.members = members
        self.peers = [member for member in range(members.size) if member != members.rank]
        self._channels = {member: links.channels[ranks[member]] for member in self.peers}
        self._every = list(self._channels.values())
        self._ranks = ranks
        self.account = Account()
        self.ahead = dict.fromkeys(self.peers, 0)
        """Buffers that come from each peer before the data of the operation under way."""
        self._links = links
        self._generation = generation
        self._sequence = 0
        self._header = b""
        self._headers = {peer: bytearray(_HEADER.size) for peer in self.peers}
        self._weights = [np.zeros(len(shards), np.float64) for shards in members.shards]
        self._unchecked: list[int] = []

    def channel(self, peer: int) -> Channel:
        return self._channels[peer]

    def begin(self, text: str, weights: Sequence[float] | None = None) -> None:
        """Queues this member's header to all peers, and room for theirs."""
        self._sequence += 1
        self.account.last = self._ranks[self.members.rank]
        self._header = _HEADER.pack(self._generation, self._sequence, text.encode()[:148])
        self._unchecked = list(self.peers)
        own = self._weights[self.members.rank]
        if weights is not None:
            own[:] = weights
        for peer in self.peers:
            channel = self.channel(peer)
            channel.restart()
            channel.send(memoryview(self._header))
            channel.receive(memoryview(self._headers[peer]))
            self.ahead[peer] = 1
            if weights is not None:
                if own.size:
                    channel.send(as_bytes(own))
                if self._weights[peer].size:
                    channel.receive(as_bytes(self._weights[peer]))
                    self.ahead[peer] = 2

    def agreed(self) -> bool:
        """Whether the headers (and weights) of all peers have come. Raises Mismatch where one differs."""
        if self._unchecked:
            waiting = []
            for peer in self._unchecked:
                came = self.channel(peer).received
                if came and self._headers[peer] != self._header:
                    raise self._mismatch(peer)
                if came < self.ahead[peer]:
                    waiting.append(peer)
            if len(waiting) < len(self._unchecked) and not waiting:
                self.account.last = self._ranks[self._unchecked[-1]]
            self._unchecked = waiting
        return not self._unchecked

    def _mismatch(self, peer: int) -> Mismatch:
        mine, theirs = (
            _HEADER.unpack(header)[2].rstrip(b"\0").decode(errors="replace")
            for header in (self._header, self._headers[peer])
        )
        return Mismatch(
            f"All ranks must call the same operations in the same order, with the same sizes and dtypes. "
            f"Rank {self._ranks[self.members.rank]} called {mine}, rank {self._ranks[peer]} called {theirs}"
        )

    def weights(self) -> list[float]:
        """All shards' weights, once agreed."""
        values = [0.0] * self.members.num_shards
        for shards, weights in zip(self.members.shards, self._weights, strict=True):
            for shard, weight in zip(shards, weights.tolist(), strict=True):
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
        """Moves bytes until `step` returns True. Raises Gone."""
        before = self._links.waited
        try:
            self._links.pump(step)
        finally:
            self.account.waiting += self._links.waited - before

    def tell_lost(self, rank: int) -> None:
        self._links.lose(rank, "was lost")

    def close(self) -> None:
        self._links.close()
