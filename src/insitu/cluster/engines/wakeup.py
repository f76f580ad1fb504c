"""One descriptor to wait on for signals and for other descriptors."""

from __future__ import annotations

import contextlib
import os
import select
import signal
from typing import Protocol


class HasFileno(Protocol):
    def fileno(self) -> int: ...


class Wakeup:
    """Becomes readable once one of `signals` has come or a watched file is ready.

    Takes over the handlers of these signals. One per process, made in its main thread.
    """

    def __init__(self, *signals: signal.Signals) -> None:
        self._epoll = select.epoll()
        self._reader, self._writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._epoll.register(self._reader, select.EPOLLIN)
        signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        for number in signals:
            signal.signal(number, lambda *_: None)

    def fileno(self) -> int:
        return self._epoll.fileno()

    def take_signals(self) -> bytes:
        """Return the numbers of the signals that have come since the last call."""
        with contextlib.suppress(BlockingIOError):
            return os.read(self._reader, 4096)
        return b""

    def watch(self, file: HasFileno, *, writable: bool = False) -> None:
        """Watch `file` until it is closed; `writable`: also for room to write."""
        events = select.EPOLLIN | (select.EPOLLOUT if writable else 0)
        try:
            self._epoll.register(file.fileno(), events)
        except FileExistsError:
            self._epoll.modify(file.fileno(), events)

    def unwatch(self, file: HasFileno) -> None:
        self._epoll.unregister(file.fileno())

    def close(self) -> None:
        signal.set_wakeup_fd(-1)
        self._epoll.close()
        os.close(self._reader)
        os.close(self._writer)
