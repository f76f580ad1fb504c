"""The Unix sockets of the ranks of one host, over which they hand each other their memory.

Ranks that say they are on one host dial each other, and each sends the other a segment at once. So it is
known before the group forms whether memory can be shared. If it can't, for any reason, all ranks agree to use
TCP.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
import time
from collections.abc import Callable, Collection, Mapping, Sequence

from insitu.base.errors import ExchangeError
from insitu.exchange import memory, memory_passing
from insitu.exchange.handshake import PeerInfo
from insitu.exchange.plan import MemberLost
from insitu.exchange.rendezvous import Peer

_HELLO = struct.Struct("!I32s")
"""Rank of the caller; the name of the listener that it calls."""
_PART = struct.Struct("!Q")
"""Bytes of a segment."""
_LENGTH = struct.Struct("!I")
_FRAME_LIMIT = 1 << 16
_IN_FLIGHT = 256
"""Descriptors under way at once at most: the system allows as many as a user may open files, often 1024."""


class MemoryLinks:
    """One member's connections to the other members of its host, by member number."""

    def __init__(self, member: int, connections: Mapping[int, socket.socket]) -> None:
        self._member = member
        self._connections = dict(connections)

    def swap(self, file: int, size: int, synchronize: Callable[[], None]) -> dict[int, tuple[int, int]]:
        """Hand the segment `file` to all others, and return (descriptor, size) of each other one's.

        All members call it together; `synchronize` waits for all. The caller closes the descriptors. Raises
        ExchangeError, and what `synchronize` raises.
        """
        received: dict[int, tuple[int, int]] = {}
        count = len(self._connections) + 1
        at_once = max(1, _IN_FLIGHT // count)
        try:
            for start in range(1, max(2, count), at_once):
                offsets = range(start, min(count, start + at_once))
                for offset in offsets:
                    to = self._connections[(self._member + offset) % count]
                    memory_passing.send(to, _PART.pack(size), file)
                synchronize()
                for offset in offsets:
                    other = (self._member - offset) % count
                    data, theirs = memory_passing.receive(self._connections[other], _PART.size)
                    received[other] = theirs, *_PART.unpack(data)
        except BaseException:
            for theirs, _ in received.values():
                os.close(theirs)
            raise
        return received

    def close(self) -> None:
        """Close all connections."""
        for connection in self._connections.values():
            connection.close()


class LinkMaker:
    """Connects the ranks of a host while their group forms."""

    def __init__(
        self,
        rank: int,
        infos: Sequence[PeerInfo],
        peers: Mapping[int, Peer],
        listener: memory_passing.MemoryListener | None,
        control: int,
    ) -> None:
        """`peers` are the others by rank, with their control connections. `listener` None: this rank shares
        no memory. `control` is
        the segment that this rank would lead with; it isn't closed."""
        self._rank = rank
        self._infos = infos
        self._peers = {peer: other.connection for peer, other in peers.items()}
        self._listener = listener
        self._control = control
        own = infos[rank]["host"]
        self._mates = [
            r
            for r, info in enumerate(infos)
            if r != rank and own and info["host"] == own and info.get("memory")
        ]
        #: Connections by rank.
        self._connections: dict[int, socket.socket] = {}
        #: The control segments of the other ranks of this host, by rank.
        self._controls: dict[int, int] = {}
        #: The ranks whose lists haven't come.
        self.silent: set[int] = set()

    def link(self, deadline: float) -> list[set[int]]:
        """Return, by rank, the ranks whose memory that rank can map.

        Waits until `deadline` (monotonic) at most. Raises MemberLost if a peer ends, TimeoutError.
        """
        try:
            dialled = self._dial()
            frames = self._swap_frames(dialled, deadline)
            accepted = self._accept([r for r in self._mates if r > self._rank and self._rank in frames[r]])
            frames = self._swap_frames(accepted, deadline)
            for rank in dialled:
                if self._rank in frames[rank]:
                    self._receive(rank)
            return self._swap_frames(sorted(self._controls), deadline)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close all connections and descriptors."""
        for connection in self._connections.values():
            connection.close()
        self.close_controls()

    def close_controls(self) -> None:
        """Close the control segments that weren't taken."""
        for file in self._controls.values():
            os.close(file)
        self._controls.clear()

    def take_control(self, rank: int) -> int:
        """Return the descriptor of the control segment of a rank of this host, for the caller to close."""
        return os.dup(self._control) if rank == self._rank else self._controls.pop(rank)

    def take_links(self, ranks: Sequence[int]) -> MemoryLinks:
        """Return the connections to the `ranks` of this host, which become the caller's."""
        links = {number: self._connections.pop(r) for number, r in enumerate(ranks) if r != self._rank}
        return MemoryLinks(ranks.index(self._rank), links)

    def _dial(self) -> list[int]:
        """Dial the lower ranks of this host and send each a segment. Return those that were reached."""
        dialled = []
        for rank in self._mates:
            info = self._infos[rank]
            if rank < self._rank:
                with contextlib.suppress(ExchangeError):
                    connection = memory_passing.dial(str(info["memory"]), int(info["process"]))
                    self._connections[rank] = connection
                    hello = _HELLO.pack(self._rank, str(info["memory"]).encode())
                    memory_passing.send(connection, hello, self._control)
                    dialled.append(rank)
        return dialled

    def _accept(self, expected: Collection[int]) -> list[int]:
        """Take the segments of the higher ranks that have called, and send each this rank's."""
        accepted = []
        listener = self._listener
        while expected and listener is not None and (call := listener.accept()) is not None:
            connection, process = call
            try:
                data, file = memory_passing.receive(connection, _HELLO.size)
                rank, name = _HELLO.unpack(data)
                known = rank in expected and rank not in self._connections
                if not known or name != listener.name.encode() or process != self._infos[rank]["process"]:
                    os.close(file)
                    raise ExchangeError("The caller is no rank of this group")
                self._keep(rank, connection, file)
                memory_passing.send(connection, _HELLO.pack(self._rank, name), self._control)
                accepted.append(rank)
            except (ExchangeError, BlockingIOError):
                connection.close()
        return accepted

    def _receive(self, rank: int) -> None:
        """Take the segment that a lower rank has sent."""
        with contextlib.suppress(ExchangeError, BlockingIOError):
            _, file = memory_passing.receive(self._connections[rank], _HELLO.size)
            self._keep(rank, self._connections[rank], file)

    def _keep(self, rank: int, connection: socket.socket, file: int) -> None:
        try:
            memory.check_segment(file, os.fstat(self._control).st_size)
            # Some policies let a descriptor be received, but not be opened again.
            os.close(os.open(f"/proc/self/fd/{file}", os.O_RDWR | os.O_CLOEXEC))
        except (ExchangeError, OSError) as error:
            os.close(file)
            raise ExchangeError(f"Memory of rank {rank} can't be mapped: {error}") from error
        self._connections[rank], self._controls[rank] = connection, file

    def _swap_frames(self, ranks: Collection[int], deadline: float) -> list[set[int]]:
        """Send all peers a list of ranks over the control connections. Return the lists of all, by rank."""
        body = ",".join(map(str, ranks)).encode()
        self.silent = set(self._peers)
        found = swap_frames(self._peers, _LENGTH.pack(len(body)) + body, deadline, self.silent)
        found[self._rank] = body
        return [_parse_ranks(rank, found[rank]) for rank in range(len(self._infos))]


def _parse_ranks(sender: int, body: bytes) -> set[int]:
    """Return the ranks that a frame lists. Raises MemberLost for anything else."""
    try:
        return {int(rank) for rank in body.split(b",") if rank}
    except ValueError:
        raise MemberLost(sender, "sent something that is no list of ranks") from None


def swap_frames(
    peers: Mapping[int, socket.socket], frame: bytes, deadline: float, silent: set[int]
) -> dict[int, bytes]:
    """Send a frame to all peers, and return the body of the one that each of them sends.

    Those that have sent theirs are removed from `silent`. Raises MemberLost if a connection ends or
    carries something else, TimeoutError at the deadline.
    """
    outgoing = dict.fromkeys(peers, frame)
    buffers = dict.fromkeys(peers, b"")
    bodies: dict[int, bytes] = {}
    while outgoing or len(bodies) < len(peers):
        poll = select.poll()
        ranks = {}
        for rank, connection in peers.items():
            events = (select.POLLOUT if rank in outgoing else 0) | (0 if rank in bodies else select.POLLIN)
            if events:
                ranks[connection.fileno()] = rank
                poll.register(connection, events)
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        for file, events in poll.poll(left * 1000):
            rank = ranks[file]
            try:
                if events & select.POLLOUT and rank in outgoing:
                    outgoing[rank] = outgoing[rank][peers[rank].send(outgoing[rank]) :]
                    if not outgoing[rank]:
                        del outgoing[rank]
                if events & ~select.POLLOUT and rank not in bodies:
                    # An encrypted connection may hold the rest, of which `poll` knows nothing.
                    while rank not in bodies:
                        _receive_frame(rank, peers[rank], buffers, bodies)
                    silent.difference_update(bodies)
            except BlockingIOError:
                continue
            except OSError:
                raise MemberLost(rank, "died") from None
    return bodies


def _receive_frame(
    rank: int, connection: socket.socket, buffers: dict[int, bytes], bodies: dict[int, bytes]
) -> None:
    """Receive a part of one frame, and not a byte of what follows it."""
    buffer = buffers[rank]
    missing = _LENGTH.size - len(buffer)
    if missing <= 0:
        (length,) = _LENGTH.unpack_from(buffer)
        if length > _FRAME_LIMIT:
            raise MemberLost(rank, f"sent a frame of {length} bytes")
        missing = _LENGTH.size + length - len(buffer)
    data = connection.recv(missing)
    if not data:
        raise MemberLost(rank, "died")
    buffer = buffers[rank] = buffer + data
    if len(buffer) >= _LENGTH.size and len(buffer) == _LENGTH.size + _LENGTH.unpack_from(buffer)[0]:
        bodies[rank] = buffer[_LENGTH.size :]
