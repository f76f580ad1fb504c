"""A member's connections to the others: moving bytes over all of them at once, and noticing who is lost.

Each peer has two connections. "data" carries only what operations move. "control" carries small frames:

- a heartbeat, which a member sends while it waits: a peer that receives it knows that its sender isn't stuck,
  and if its host has vanished, nothing acknowledges the frame;
- which rank was lost;
- which rank called another operation;
- that its sender leaves.

A peer that computes reads no heartbeats. After a quarter of an hour they would fill its kernel's buffers,
which must not look like a loss. So no connection has a time limit of the kernel's, which can't tell a full
connection from a dead one, and a heartbeat is sent only once the previous one has been acknowledged.
"""

from __future__ import annotations

import contextlib
import fcntl
import math
import os
import select
import socket
import struct
import termios
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from insitu.base.errors import InputError
from insitu.exchange import tcp_tuning
from insitu.exchange.plan import MemberLost, Mismatch
from insitu.exchange.tls_socket import TlsSocket, is_encrypted, post

# How long a host may be silent, and whether one is


HOST_TIMEOUT_ENV = "INSITU_HOST_TIMEOUT"
"""Seconds for which a host may acknowledge nothing before it counts as lost: the one setting for all
links."""
_DEFAULT_HOST_TIMEOUT = 5.0
"""A short loss of a link costs that time, and the time that the system needs to resend."""
_UNACKED, _LAST_ACK, _RTT, _WINDOW, _INFO_BYTES = 24, 56, 68, 228, 232
"""Offsets in `struct tcp_info`: the packets that aren't acknowledged, the milliseconds since the last
acknowledgement, the microseconds of a round trip, the bytes that the other end has room for (Linux 5.4); and
how
much of it is asked for."""
_LEAST_ROOM = 64
"""Bytes of room at the other end at least, for what isn't even sent to count as lost."""
_ROUND_TRIPS = 20
"""Round trips that the limit is at least, on a long path."""


def read_host_timeout(default: float = _DEFAULT_HOST_TIMEOUT) -> float:
    """Return the seconds for which a host may be silent; `default` if nobody has set them. Raises
    InputError for a value that can't be."""
    text = os.environ.get(HOST_TIMEOUT_ENV) or str(default)
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0.1 <= seconds <= 3600:
        raise InputError(f"{HOST_TIMEOUT_ENV} must be seconds in [0.1, 3600]. Received: {text!r}")
    return seconds


@dataclass(frozen=True, slots=True)
class Silence:
    """The kernel's information about the host at the other end of a connection. That host's kernel
    acknowledges, also for a process that is busy or stopped."""

    #: Seconds since it has acknowledged anything, while something waits for that; else 0.0.
    seconds: float = 0.0
    #: Seconds of a round trip, as the kernel estimates them; 0.0 if it can't say.
    round_trip: float = 0.0

    def exceeds(self, limit: float) -> bool:
        """Return True if it lasts for more than `limit` seconds, and for some round trips if these take
        longer."""
        return self.seconds > max(limit, _ROUND_TRIPS * self.round_trip if limit > 0 else 0)


def measure_silence(connection: socket.socket) -> Silence:
    """Return for how long the other end has acknowledged nothing that was sent to it. Only TCP connections
    can be silent."""
    try:
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
    except (OSError, AttributeError):
        return Silence()
    if len(info) < _RTT + 4:
        return Silence()
    unacknowledged, silent, round_trip = (
        struct.unpack_from("=I", info, at)[0] for at in (_UNACKED, _LAST_ACK, _RTT)
    )
    # A packet that isn't even sent has no route, or no room at the other end; the latter is no loss.
    room = struct.unpack_from("=I", info, _WINDOW)[0] if len(info) >= _INFO_BYTES else 0
    waits = bool(unacknowledged) or (room >= _LEAST_ROOM and not has_acknowledged_all(connection))
    return Silence(silent / 1000 if waits else 0.0, round_trip / 1e6)


def is_unreachable(connection: socket.socket, milliseconds: float) -> bool:
    """Return True if the host at the other end has acknowledged nothing for so long, or for some round trips
    if these take longer."""
    return measure_silence(connection).exceeds(milliseconds / 1000)


def has_acknowledged_all(connection: socket.socket) -> bool:
    """Return True if the other end's kernel has acknowledged everything that was sent."""
    with contextlib.suppress(OSError, ValueError):  # also for one that is closed
        return not struct.unpack("i", fcntl.ioctl(connection, termios.TIOCOUTQ, bytes(4)))[0]
    return False


_FRAME = struct.Struct("!cxxxi")
"""Kind; a rank."""
_HEARTBEAT, _LOST, _MISMATCH, _LEAVE = b"b", b"l", b"d", b"q"
_HEARTBEAT_INTERVAL = 0.1
"""Seconds."""
_ACK_TIMEOUT_MS = 1000 * read_host_timeout()
"""Milliseconds of heartbeats without any acknowledgement after which a host is lost."""
_WAITING_TIMEOUT = 1.0
"""Seconds since its last frame for which a peer counts as waiting itself."""
_POLLS, _POLLS_WHEN_CROWDED = 40, 12
"""Polls of all connections before sleeping. If each rank has a processor, it isn't yielded in between: a
member that yields loses a whole time slice to a busy neighbour, one that sleeps is woken by what it waits
for. If ranks share processors, yielding lets the others do their part."""
_COMPILED_POLLS, _COMPILED_POLLS_WHEN_CROWDED = 150, 40
_MAX_BUFFERS = 16
"""Buffers given to one system call at most."""


def _first_buffers(buffers: deque[memoryview]) -> list[memoryview]:
    return list(buffers) if len(buffers) <= _MAX_BUFFERS else [buffers[i] for i in range(_MAX_BUFFERS)]


class PendingTransfers(Protocol):
    """The transfers under way with one peer."""

    @property
    def connection(self) -> socket.socket:
        """The data connection."""

    @property
    def ended(self) -> bool:
        """True if the connection has ended."""

    @property
    def outgoing(self) -> object:
        """True if there is something to send."""

    @property
    def incoming(self) -> object:
        """True if it expects to receive something."""

    @property
    def idle(self) -> bool:
        """True if there is nothing to send or to receive."""

    def receive_some(self) -> bool:
        """Receive what has arrived. Return True if anything has."""


class DataChannel:
    """One data connection with a queue of buffers to send and one of buffers to fill."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        #: The buffers to send; the first one without the part that is sent.
        self.outgoing: deque[memoryview] = deque()
        #: The buffers to fill; the first one without the part that is filled.
        self.incoming: deque[memoryview] = deque()
        #: Buffers sent since `reset_counts`.
        self.sent = 0
        #: Buffers filled since `reset_counts`.
        self.received = 0
        #: True if the connection has ended.
        self.ended = False

    def reset_counts(self) -> None:
        """Count sent and received buffers from 0."""
        self.sent = self.received = 0

    def send(self, data: memoryview) -> None:
        """Queue bytes (not none) to send. They must not change until they are sent."""
        self.outgoing.append(data)

    def receive(self, data: memoryview) -> None:
        """Queue memory (not empty) for the next bytes."""
        self.incoming.append(data)

    def send_some(self) -> bool:
        """Send what the system takes now. Return True if it took anything."""
        outgoing = self.outgoing
        if not outgoing:
            return False
        try:
            if len(outgoing) == 1:
                count = self.connection.send(outgoing[0])
            else:
                count = self.connection.sendmsg(_first_buffers(outgoing))
        except BlockingIOError:
            return False
        except OSError:
            self.ended = True
            return False
        while outgoing and count >= len(outgoing[0]):
            count -= len(outgoing.popleft())
            self.sent += 1
        if count:
            outgoing[0] = outgoing[0][count:]
        return True

    def receive_some(self) -> bool:
        """Receive what has arrived. Return True if anything has."""
        incoming = self.incoming
        if not incoming:
            return False
        try:
            if len(incoming) == 1:
                count = self.connection.recv_into(incoming[0])
            else:
                count = self.connection.recvmsg_into(_first_buffers(incoming))[0]
        except BlockingIOError:
            return False
        except OSError:
            count = 0
        if not count:
            self.ended = True
            return False
        while incoming and count >= len(incoming[0]):
            count -= len(incoming.popleft())
            self.received += 1
        if count:
            incoming[0] = incoming[0][count:]
        return True

    @property
    def idle(self) -> bool:
        """True if nothing is queued."""
        return not self.outgoing and not self.incoming


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
        """`control` and `data` are the connections by rank. `crowded`: the ranks of this host are more than
        its processors. `threads`: some are threads of one process."""
        self._rank = rank
        self._crowded = crowded
        self._polls = _POLLS_WHEN_CROWDED if crowded else _POLLS
        self._control = dict(control)
        #: The data channels by rank.
        self.channels = {peer: DataChannel(connection) for peer, connection in sorted(data.items())}
        self._all_channels = list(self.channels.values())
        self._pending: Mapping[int, PendingTransfers] = self.channels
        self.threads = threads
        #: Seconds without any progress after which a peer is lost.
        self.stall_timeout = stall_timeout
        #: Says whether others continue in a later generation, without a member that this one may wait for.
        #: Asked with each heartbeat, so only in a wait. Written by who forms the group.
        self.is_superseded: Callable[[], bool] = lambda: False
        self._last_frame_at = dict.fromkeys(control, 0.0)
        self._waits_for = dict.fromkeys(control, rank)
        self._left: set[int] = set()
        self._ended: set[int] = set()
        self._partial_frames = dict.fromkeys(control, b"")
        self._lost: int | None = None
        self._mismatch: tuple[int, int] | None = None
        self._last_heartbeat = 0.0
        self._heartbeats_since = 0.0
        #: Seconds spent asleep so far.
        self.waited = 0.0
        #: True if data is encrypted, which compiled code can't do.
        self.encrypted = is_encrypted([*data.values()])
        for connection in data.values():
            tcp_tuning.choose_after_connect(connection)
            if isinstance(connection, TlsSocket):
                connection.read_ahead = True  # `run_until` asks each channel before it sleeps

    def run_until(self, advance: Callable[[], bool]) -> None:
        """Send and receive until `advance`, called after every transfer, returns True. Raises MemberLost."""
        polls = 0
        progress = time.monotonic()
        while not advance():
            moved = False
            for channel in self._all_channels:
                if channel.outgoing and channel.send_some():
                    moved = True
                if channel.incoming and channel.receive_some():
                    moved = True
            if moved:
                polls = 0
            elif polls < self._polls:
                polls += 1
                if self._crowded:
                    os.sched_yield()
            else:
                if polls == self._polls:
                    polls += 1
                    progress = time.monotonic()
                self._sleep(progress)

    def sleep_until(
        self, pending: Mapping[int, PendingTransfers], resume: Callable[[], tuple[bool, bool]]
    ) -> None:
        """Sleep until something can be sent or received and call `resume`, until it returns (True, ...).

        The second value that `resume` returns says whether it moved anything. `pending`: the transfers under
        way, by rank. Raises MemberLost, Mismatch.
        """
        progress = time.monotonic()
        self._pending = pending
        try:
            done = False
            while not done:
                self._sleep(progress)
                done, moved = resume()
                if moved:
                    progress = time.monotonic()
        finally:
            self._pending = self.channels

    @property
    def poll_limit(self) -> tuple[int, bool]:
        """For compiled code: how often to poll all connections before sleeping, and whether to yield the
        processor in between."""
        if self.threads:
            return 0, False
        return (_COMPILED_POLLS_WHEN_CROWDED if self._crowded else _COMPILED_POLLS), self._crowded

    # Waiting

    def _find_awaited(self) -> list[int]:
        """Return the peers that this member waits for."""
        return [peer for peer, pending in self._pending.items() if not pending.idle]

    def _sleep(self, progress: float) -> None:
        """Wait for any connection, and raise if a peer is lost. `progress`: when bytes were last moved."""
        start = time.monotonic()
        poll = select.poll()
        for pending in self._pending.values():
            if not pending.ended and not pending.idle:
                events = (select.POLLIN if pending.incoming else 0) | (
                    select.POLLOUT if pending.outgoing else 0
                )
                poll.register(pending.connection, events)
        for peer, connection in self._control.items():
            if peer not in self._ended:
                poll.register(connection, select.POLLIN)
        until = min(self._last_heartbeat + _HEARTBEAT_INTERVAL, progress + self.stall_timeout) - start
        ready = {file for file, _ in poll.poll(max(1.0, until * 1000) if until > 0 else 0)}
        now = time.monotonic()
        self.waited += now - start
        for peer, connection in self._control.items():
            if connection.fileno() in ready:
                self._read_frames(peer, connection, now)
        self._raise_if_lost(progress, now)
        if now >= self._last_heartbeat + _HEARTBEAT_INTERVAL:
            self._check_hosts(now)

    def _check_hosts(self, now: float) -> None:
        """Find hosts that have vanished, and send a heartbeat to the others. Raises MemberLost if a later
        generation makes the wait vain: its publisher may know of a loss long before."""
        if self.is_superseded():
            raise MemberLost(self._rank, "waited for one that has been replaced")
        if now > self._last_heartbeat + 3 * _HEARTBEAT_INTERVAL:
            self._heartbeats_since = now
        elif (now - self._heartbeats_since) * 1000 > _ACK_TIMEOUT_MS:
            vanished = {
                p
                for p, c in self._control.items()
                if p not in self._ended and is_unreachable(c, _ACK_TIMEOUT_MS)
            }
            self._ended |= vanished
        awaited = self._find_awaited()
        self._send_heartbeat(awaited[0] if awaited else self._rank, now)

    def report_waiting_for(self, rank: int) -> None:
        """Report to the peers that this member waits for `rank`, to which it has no connection."""
        now = time.monotonic()
        if now >= self._last_heartbeat + _HEARTBEAT_INTERVAL:
            self._send_heartbeat(rank, now)

    def _send_heartbeat(self, rank: int, now: float) -> None:
        """Send the rank that this member waits for, to the peers that have acknowledged the previous one."""
        self._send_frame(_HEARTBEAT, rank, has_acknowledged_all)
        self._last_heartbeat = now

    def _read_frames(self, peer: int, connection: socket.socket, now: float) -> None:
        """Read and handle the control frames of one peer."""
        try:
            data = connection.recv(4096)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._ended.add(peer)
            return
        data = self._partial_frames[peer] + data
        whole = len(data) - len(data) % _FRAME.size
        self._partial_frames[peer] = data[whole:]
        for kind, rank in _FRAME.iter_unpack(data[:whole]):
            self._last_frame_at[peer] = now
            self._waits_for[peer] = rank
            if kind == _LEAVE:
                self._left.add(peer)
            elif kind == _LOST and self._lost is None:
                self._lost = rank
            elif kind == _MISMATCH:
                self._mismatch = peer, rank

    def read_control(self) -> None:
        """Read the control frames of all peers. A member that never waits calls it regularly."""
        now = time.monotonic()
        for peer, connection in self._control.items():
            if peer not in self._ended:
                self._read_frames(peer, connection, now)

    def _send_frame(
        self, kind: bytes, rank: int, accepts: Callable[[socket.socket], bool] = lambda connection: True
    ) -> None:
        """Send a control frame to each peer whose connection `accepts` it."""
        frame = _FRAME.pack(kind, rank)
        for peer, connection in self._control.items():
            if peer not in self._ended and accepts(connection):
                with contextlib.suppress(OSError):
                    post(connection, frame)

    # Loss

    def _raise_if_lost(self, progress: float, now: float) -> None:
        """Raise if an awaited peer has ended or is stuck, or if another one reports a loss or a mismatch."""
        awaited = self._find_awaited()
        # One that has left sent all bytes before, on a connection that may be slower than the control frames.
        lost = self._ended - self._left
        ended = [peer for peer in awaited if peer in lost or self._pending[peer].ended]
        if ended or self._lost is not None or (awaited and self._mismatch is not None):
            # Bytes that arrived before the end still count.
            if any(self._pending[peer].receive_some() for peer in awaited):
                return
            if self._lost is None and self._mismatch is None:
                self._read_last_frames(ended)
            if self._mismatch is not None:
                raise self._mismatch_error(*self._mismatch)
            if self._lost is not None:
                reason = "was evicted by the other ranks" if self._lost == self._rank else "was lost"
                raise self.report_lost(self._lost, reason)
            raise self.report_lost(ended[0], "left the group" if ended[0] in self._left else "died")
        if awaited and now - progress >= self.stall_timeout:
            reason = f"made no progress for {self.stall_timeout:g} s"
            raise self.report_lost(self._find_stuck(awaited, now), reason)

    def _mismatch_error(self, peer: int, rank: int) -> Mismatch:
        return Mismatch(
            "All ranks must call the same operations in the same order, with the same sizes and dtypes. "
            f"Received: an operation of rank {rank} that is another one than that of rank {peer}. "
            "Make all ranks take the same path through the program"
        )

    def report_mismatch(self, rank: int) -> None:
        """Report to all others that `rank` called another operation than this member."""
        self._send_frame(_MISMATCH, rank)

    def _read_last_frames(self, ended: Sequence[int]) -> None:
        """Read the last frames of peers that have ended: one that lost another peer has reported it."""
        for peer in ended:
            connection = self._control.get(peer)
            if connection is not None and peer not in self._ended:
                with contextlib.suppress(OSError):
                    self._read_frames(peer, connection, time.monotonic())

    def _find_stuck(self, awaited: Sequence[int], now: float) -> int:
        """Return the awaited peer that has been silent for longest. If that one waits itself, follow whom it
        waits for."""
        silent = min(awaited, key=lambda peer: self._last_frame_at.get(peer, 0.0))
        seen = {self._rank}
        while now - self._last_frame_at.get(silent, 0.0) < _WAITING_TIMEOUT and silent not in seen:
            seen.add(silent)
            following = self._waits_for.get(silent, silent)
            if following == self._rank:
                break
            silent = following
        return silent

    def report_lost(self, rank: int, reason: str) -> MemberLost:
        """Report to all others which rank was lost, so that they name the same one. Return the error to
        raise."""
        self._lost = rank
        self._send_frame(_LOST, rank)
        return MemberLost(rank, reason)

    def close(self) -> None:
        """Report to all others that this member leaves, and close all connections."""
        self._send_frame(_LEAVE, self._rank)
        for channel in self._all_channels:
            channel.connection.close()
        for connection in self._control.values():
            connection.close()
