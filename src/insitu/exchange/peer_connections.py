"""Connections to other members, and moving bytes over all of them at once without ever hanging.

Each peer has two connections. "data" carries nothing but what operations move. "control" carries small
frames: a beat while its sender waits, so that a vanished host is noticed (it acknowledges nothing) and a
waiting peer is not taken for a stuck one; who was lost; who does something else than the others; good-bye.
A peer that computes reads no beats. They fill what its kernel has room for, after a quarter of an hour, and
that must not look like a loss: so no time limit of the kernel's is set on a connection, since it doesn't tell
a full one from a dead one, and a beat is sent only once the one before has been acknowledged.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import socket
import struct
import termios
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from insitu.exchange import tcp_tuning
from insitu.exchange.transport import MemberLost, Mismatch

_FRAME = struct.Struct("!cxxxi")
"""Kind; a rank."""
_BEAT, _LOST, _DIFFERENT, _BYE = b"b", b"l", b"d", b"q"
_BEAT_EVERY = 0.1
_SILENT = 500
"""Milliseconds of beats without any acknowledgement after which a host is gone."""
_UNACKED, _LAST_ACK, _WINDOW, _INFO_BYTES = 24, 56, 228, 232
"""Where `struct tcp_info` has the packets that aren't acknowledged, the milliseconds since the last
acknowledgement, and the bytes that the other end has room for (Linux 5.4); how much of it is asked for."""
_RECENT = 1.0
"""Seconds since its last beat for which a peer counts as waiting itself."""
_LOOKS, _LOOKS_WHEN_CROWDED = 40, 12
"""Rounds of asking all connections before sleeping. Where ranks have a processor each, it isn't yielded in
between: to one that yields, a busy neighbour's whole turn passes, while one that sleeps is woken by what it
waits for. Where they are crowded, yielding lets the others do their part."""
_COMPILED_LOOKS, _COMPILED_LOOKS_WHEN_CROWDED = 150, 40
_VIEWS = 16
"""Buffers given to one system call at most."""


def _first(views: deque[memoryview]) -> list[memoryview]:
    return list(views) if len(views) <= _VIEWS else [views[i] for i in range(_VIEWS)]


def _is_silent(connection: socket.socket) -> bool:
    """Whether the host at the other end acknowledges nothing. That is its kernel's part: a process that is
    busy or stopped is not silent."""
    try:
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
    except (OSError, AttributeError):
        return False
    if len(info) < _LAST_ACK + 4:
        return False
    unacknowledged, milliseconds = (struct.unpack_from("=I", info, at)[0] for at in (_UNACKED, _LAST_ACK))
    if milliseconds <= _SILENT:
        return False
    # A packet that isn't even sent has no route, or no room at the other end, which is no loss.
    room = struct.unpack_from("=I", info, _WINDOW)[0] if len(info) >= _INFO_BYTES else 0
    return bool(unacknowledged) or (room >= _FRAME.size and not _has_all_acknowledged(connection))


def _has_all_acknowledged(connection: socket.socket) -> bool:
    """Whether the other end's kernel has taken everything that was sent."""
    try:
        return not struct.unpack("i", fcntl.ioctl(connection, termios.TIOCOUTQ, bytes(4)))[0]
    except OSError:
        return False


class PendingTransfers(Protocol):
    """What is under way with one peer."""

    @property
    def connection(self) -> socket.socket: ...

    @property
    def ended(self) -> bool: ...

    @property
    def out(self) -> object:
        """True where there is something to send."""

    @property
    def into(self) -> object:
        """True where something is to come."""

    @property
    def idle(self) -> bool: ...

    def pull(self) -> bool:
        """Takes what has come. Returns whether anything moved."""


class DataChannel:
    """One data connection: what is still to be sent, and where what comes is to be put."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.out: deque[memoryview] = deque()
        self.into: deque[memoryview] = deque()
        self.sent = 0
        """Buffers sent since `restart`."""
        self.received = 0
        """Buffers filled since `restart`."""
        self.ended = False

    def restart(self) -> None:
        self.sent = self.received = 0

    def send(self, data: memoryview) -> None:
        """Puts bytes (not none) in the queue. They must not change until they are sent."""
        self.out.append(data)

    def receive(self, data: memoryview) -> None:
        """Says where the next bytes (not none) go."""
        self.into.append(data)

    def push(self) -> bool:
        """Sends what the system takes now. Returns whether anything moved."""
        out = self.out
        if not out:
            return False
        try:
            count = self.connection.send(out[0]) if len(out) == 1 else self.connection.sendmsg(_first(out))
        except BlockingIOError:
            return False
        except OSError:
            self.ended = True
            return False
        while out and count >= len(out[0]):
            count -= len(out.popleft())
            self.sent += 1
        if count:
            out[0] = out[0][count:]
        return True

    def pull(self) -> bool:
        """Takes what has come. Returns whether anything moved."""
        into = self.into
        if not into:
            return False
        try:
            if len(into) == 1:
                count = self.connection.recv_into(into[0])
            else:
                count = self.connection.recvmsg_into(_first(into))[0]
        except BlockingIOError:
            return False
        except OSError:
            count = 0
        if not count:
            self.ended = True
            return False
        while into and count >= len(into[0]):
            count -= len(into.popleft())
            self.received += 1
        if count:
            into[0] = into[0][count:]
        return True

    @property
    def idle(self) -> bool:
        return not self.out and not self.into


class PeerConnections:
    """All connections of one member. Not for several threads."""

    def __init__(
        self,
        rank: int,
        control: Mapping[int, socket.socket],
        data: Mapping[int, socket.socket],
        stall_timeout: float,
        crowded: bool = False,
        threads: bool = False,
    ) -> None:
        """`crowded`: ranks of this host are more than its processors. `threads`: some share a process."""
        self._rank = rank
        self._crowded = crowded
        self._looks = _LOOKS_WHEN_CROWDED if crowded else _LOOKS
        self._control = dict(control)
        self.channels = {peer: DataChannel(connection) for peer, connection in sorted(data.items())}
        self._all = list(self.channels.values())
        self._flows: Mapping[int, PendingTransfers] = self.channels
        self.threads = threads
        self.stall_timeout = stall_timeout
        """Seconds without any progress after which a peer is given up."""
        self._heard = dict.fromkeys(control, 0.0)
        self._awaits = dict.fromkeys(control, rank)
        self._left: set[int] = set()
        self._ended: set[int] = set()
        self._rest = dict.fromkeys(control, b"")
        self._lost: int | None = None
        self._different: tuple[int, int] | None = None
        self._last_beat = 0.0
        self._beats_since = 0.0
        self.waited = 0.0
        """Seconds spent asleep so far."""
        for connection in data.values():
            tcp_tuning.choose_after_connect(connection)

    def pump(self, step: Callable[[], bool]) -> None:
        """Moves bytes until `step`, called after every move, returns True. Raises MemberLost."""
        looks = 0
        progress = time.monotonic()
        while not step():
            moved = False
            for channel in self._all:
                if channel.out and channel.push():
                    moved = True
                if channel.into and channel.pull():
                    moved = True
            if moved:
                looks = 0
            elif looks < self._looks:
                looks += 1
                if self._crowded:
                    os.sched_yield()
            else:
                if looks == self._looks:
                    looks += 1
                    progress = time.monotonic()
                self._sleep(progress)

    def attend(self, flows: Mapping[int, PendingTransfers], move: Callable[[], tuple[bool, bool]]) -> None:
        """Sleeps until something can be moved, again and again, until `move` returns (True, ...); the second
        says whether it moved anything. `flows`: what is under way, by rank. Raises MemberLost, Mismatch."""
        progress = time.monotonic()
        self._flows = flows
        try:
            through = False
            while not through:
                self._sleep(progress)
                through, moved = move()
                if moved:
                    progress = time.monotonic()
        finally:
            self._flows = self.channels

    @property
    def looks(self) -> tuple[int, bool]:
        """Of compiled code: how often to ask all connections before sleeping, and whether to yield the
        processor in between."""
        if self.threads:
            return 0, False
        return (_COMPILED_LOOKS_WHEN_CROWDED if self._crowded else _COMPILED_LOOKS), self._crowded

    # Waiting

    def _needed(self) -> list[int]:
        """Peers that this member waits for."""
        return [peer for peer, flow in self._flows.items() if not flow.idle]

    def _sleep(self, progress: float) -> None:
        """Waits for any connection, and looks after the peers' lives."""
        start = time.monotonic()
        poll = select.poll()
        for flow in self._flows.values():
            if not flow.ended and not flow.idle:
                events = (select.POLLIN if flow.into else 0) | (select.POLLOUT if flow.out else 0)
                poll.register(flow.connection, events)
        for peer, connection in self._control.items():
            if peer not in self._ended:
                poll.register(connection, select.POLLIN)
        until = min(self._last_beat + _BEAT_EVERY, progress + self.stall_timeout) - start
        ready = {file for file, _ in poll.poll(max(1.0, until * 1000) if until > 0 else 0)}
        now = time.monotonic()
        self.waited += now - start
        for peer, connection in self._control.items():
            if connection.fileno() in ready:
                self._listen(peer, connection, now)
        self._judge(progress, now)
        if now >= self._last_beat + _BEAT_EVERY:
            self._beat(now)

    def _beat(self, now: float) -> None:
        if now > self._last_beat + 3 * _BEAT_EVERY:
            self._beats_since = now
        elif (now - self._beats_since) * 1000 > _SILENT:
            vanished = {p for p, c in self._control.items() if p not in self._ended and _is_silent(c)}
            self._ended |= vanished
        needed = self._needed()
        self._say_waiting(needed[0] if needed else self._rank, now)

    def await_elsewhere(self, rank: int) -> None:
        """Now and then, while this member waits for `rank`, to which it has no connection."""
        now = time.monotonic()
        if now >= self._last_beat + _BEAT_EVERY:
            self._say_waiting(rank, now)

    def _say_waiting(self, rank: int, now: float) -> None:
        self._tell(_BEAT, rank, _has_all_acknowledged)
        self._last_beat = now

    def _listen(self, peer: int, connection: socket.socket, now: float) -> None:
        try:
            data = connection.recv(4096)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._ended.add(peer)
            return
        data = self._rest[peer] + data
        whole = len(data) - len(data) % _FRAME.size
        self._rest[peer] = data[whole:]
        for kind, rank in _FRAME.iter_unpack(data[:whole]):
            self._heard[peer] = now
            self._awaits[peer] = rank
            if kind == _BYE:
                self._left.add(peer)
            elif kind == _LOST and self._lost is None:
                self._lost = rank
            elif kind == _DIFFERENT:
                self._different = peer, rank

    def listen(self) -> None:
        """Takes what peers have said meanwhile. For now and then: who never waits would never read it."""
        now = time.monotonic()
        for peer, connection in self._control.items():
            if peer not in self._ended:
                self._listen(peer, connection, now)

    def _tell(
        self, kind: bytes, rank: int, whom: Callable[[socket.socket], bool] = lambda connection: True
    ) -> None:
        frame = _FRAME.pack(kind, rank)
        for peer, connection in self._control.items():
            if peer not in self._ended and whom(connection):
                with contextlib.suppress(OSError):
                    connection.send(frame)

    # Loss

    def _judge(self, progress: float, now: float) -> None:
        """Raises MemberLost where a peer that is needed has ended, was lost by another one, or is stuck."""
        needed = self._needed()
        ended = [peer for peer in needed if peer in self._ended or self._flows[peer].ended]
        if ended or self._lost is not None or (needed and self._different is not None):
            # What came before the end still counts.
            if any(self._flows[peer].pull() for peer in needed):
                return
            if self._lost is None and self._different is None:
                self._await_reason(ended)
            if self._different is not None:
                raise self._mismatch(*self._different)
            if self._lost is not None:
                raise self.lose(
                    self._lost, "was given up by the others" if self._lost == self._rank else "was lost"
                )
            raise self.lose(ended[0], "left the group" if ended[0] in self._left else "died")
        if needed and now - progress >= self.stall_timeout:
            raise self.lose(self._stuck(needed, now), f"made no progress for {self.stall_timeout:g} s")

    def _mismatch(self, peer: int, rank: int) -> Mismatch:
        return Mismatch(
            f"All ranks must call the same operations in the same order, with the same sizes and dtypes. "
            f"Rank {rank} called another one than rank {peer}"
        )

    def tell_different(self, rank: int) -> None:
        """Tells all others that `rank` does something else than this member."""
        self._tell(_DIFFERENT, rank)

    def _await_reason(self, ended: Sequence[int]) -> None:
        """A peer that ends because it lost another one has said so, right before."""
        for peer in ended:
            connection = self._control.get(peer)
            if connection is not None and peer not in self._ended:
                with contextlib.suppress(OSError):
                    self._listen(peer, connection, time.monotonic())

    def _stuck(self, needed: Sequence[int], now: float) -> int:
        """Of the peers needed, the one silent for longest; where all wait themselves, whom they wait for."""
        silent = min(needed, key=lambda peer: self._heard.get(peer, 0.0))
        seen = {self._rank}
        while now - self._heard.get(silent, 0.0) < _RECENT and silent not in seen:
            seen.add(silent)
            following = self._awaits.get(silent, silent)
            if following == self._rank:
                break
            silent = following
        return silent

    def lose(self, rank: int, why: str) -> MemberLost:
        """Tells all others who was lost, so that they blame nobody else."""
        self._lost = rank
        self._tell(_LOST, rank)
        return MemberLost(rank, why)

    def close(self) -> None:
        self._tell(_BYE, self._rank)
        for channel in self._all:
            channel.connection.close()
        for connection in self._control.values():
            connection.close()
