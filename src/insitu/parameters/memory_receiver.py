"""Receives the memory that workers of this host hand to a server, until they ask for it to be mapped."""

from __future__ import annotations

import contextlib
import itertools
import os
import secrets
import socket
import struct
import time
from collections.abc import Iterator

from insitu.base.errors import ExchangeError
from insitu.exchange import memory, memory_passing

_TICKET = struct.Struct("!32sI")
"""The ticket of a connection, and the number of the segment on it."""
_CALL_TIMEOUT = 5.0
"""Seconds that a caller has to send its memory, and that memory is kept until it is asked for."""
_MAX_WAITING = 256
"""Callers, and segments, that wait at most; the oldest is dropped for a new one."""


_CALLERS_AT_ONCE = 16
"""New callers that are served in one turn of the server's loop."""
_BACKLOG = 1024
"""Callers that can be waiting at most: memory that was handed over before is among theirs."""


def make_ticket() -> str:
    """Return a new ticket, with which a worker says for which connection memory is. It isn't a secret."""
    return secrets.token_hex(16)


def hand_over(name: str, process: int, ticket: str, number: int, file: int) -> None:
    """Hand segment `number` of the connection with this ticket to the server `process`. Raises
    ExchangeError."""
    with memory_passing.dial(name, process) as connection:
        memory_passing.send(connection, _TICKET.pack(ticket.encode(), number), file)


class MemoryReceiver:
    """The memory that was handed to one server and isn't mapped yet. Used by the event loop's thread
    alone."""

    def __init__(self) -> None:
        self._listener: memory_passing.MemoryListener | None = None
        if memory.is_supported():
            with contextlib.suppress(OSError):  # else workers use TCP
                self._listener = memory_passing.MemoryListener()
        #: Callers that haven't sent anything: their process, and the time on the monotonic clock until which
        #: they may.
        self._calls: dict[socket.socket, tuple[int, float]] = {}
        #: By ticket and number: the process that handed the segment over, its descriptor, and the time until
        #: which it is kept.
        self._files: dict[tuple[str, int], tuple[int, int, float]] = {}

    @property
    def name(self) -> str:
        """The name under which workers reach it; empty if no memory is shared."""
        return "" if self._listener is None else self._listener.name

    def fileno(self) -> int:
        """Return the listener's file descriptor, for selectors."""
        return -1 if self._listener is None else self._listener.fileno()

    @property
    def lacks_descriptors(self) -> bool:
        """Whether a caller waits for whom there was no descriptor."""
        return self._listener is not None and self._listener.lacks_descriptors

    def receive(self, most: int = _CALLERS_AT_ONCE) -> None:
        """Take what has arrived, of `most` new callers."""
        until = time.monotonic() + _CALL_TIMEOUT
        for connection, process in itertools.islice(self._accept(), most):
            if len(self._calls) >= _MAX_WAITING:
                self._hang_up(next(iter(self._calls)))
            self._calls[connection] = process, until
        for connection, (process, _) in list(self._calls.items()):
            try:
                data, file = memory_passing.receive(connection, _TICKET.size)
            except BlockingIOError:
                continue
            except ExchangeError:
                self._hang_up(connection)
                continue
            self._hang_up(connection)
            ticket, number = _TICKET.unpack(data)
            self._keep((ticket.decode(errors="replace"), number), process, file, until)

    def _accept(self) -> Iterator[tuple[socket.socket, int]]:
        while self._listener is not None and (call := self._listener.accept()) is not None:
            yield call

    def _keep(self, key: tuple[str, int], process: int, file: int, until: float) -> None:
        if key in self._files:
            os.close(self._files.pop(key)[1])
        if len(self._files) >= _MAX_WAITING:
            os.close(self._files.pop(next(iter(self._files)))[1])
        self._files[key] = process, file, until

    def _hang_up(self, connection: socket.socket) -> None:
        del self._calls[connection]
        connection.close()

    def take(self, ticket: str, process: int, number: int) -> int | None:
        """Return the descriptor that `process` has handed over for this ticket and number; None: there is
        none.

        The caller closes it.
        """
        self.receive(_BACKLOG)
        found = self._files.get((ticket, number))
        if found is None or found[0] != process:
            return None
        del self._files[ticket, number]
        return found[1]

    def expire(self, now: float) -> None:
        """Drop what has waited too long."""
        for connection, (_, until) in list(self._calls.items()):
            if until < now:
                self._hang_up(connection)
        for key, (_, file, until) in list(self._files.items()):
            if until < now:
                os.close(file)
                del self._files[key]

    def close(self) -> None:
        """Stop listening, and close all descriptors."""
        self.expire(float("inf"))
        if self._listener is not None:
            self._listener.close()
