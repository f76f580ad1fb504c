"""Limits how many bytes a second a process moves, and chooses how much one request asks for."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from insitu.base.errors import InputError
from insitu.grid.transfer.requests import CHUNK_BYTES, MAX_LENGTH

MIN_LENGTH = 64 << 10
_GROWTH = 4


class RateLimit:
    """Lets `bytes_per_second` through, in all threads together. Bytes that have come are paid for
    by a pause."""

    def __init__(
        self,
        bytes_per_second: float,
        *,
        clock: Callable[[], float] = time.monotonic,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        if not bytes_per_second > 0:
            raise InputError(
                f"A rate limit is a positive number of bytes a second. Received: {bytes_per_second}"
            )
        #: Bytes a second.
        self.bytes_per_second = bytes_per_second
        self._clock = clock
        self._pause = pause
        self._lock = threading.Lock()
        #: When all bytes so far are paid for, by `clock`. Written under the lock.
        self._free_at = clock()

    def take(self, count: int) -> None:
        """Wait until `count` more bytes are within the limit."""
        with self._lock:
            now = self._clock()
            self._free_at = max(self._free_at, now) + count / self.bytes_per_second
            seconds = self._free_at - now
        if seconds > 0:
            self._pause(seconds)


def first_length(silence: float, limit: RateLimit | None) -> int:
    """Return how many bytes the first request asks for: a chunk, or what the limit lets through in time."""
    if limit is None:
        return CHUNK_BYTES
    return _bounded(min(CHUNK_BYTES, limit.bytes_per_second * silence / 4))


def next_length(length: int, received: int, seconds: float, silence: float) -> int:
    """Return how many bytes the next request asks for, after one of `length` bytes that brought `received`.

    A request has `silence` seconds, which is how a server that says nothing is noticed. So it asks for what
    takes about a quarter of that.
    """
    wanted = received / max(seconds, 1e-6) * silence / 4
    return _bounded(min(wanted, length * _GROWTH))


def _bounded(length: float) -> int:
    return int(min(max(length, MIN_LENGTH), MAX_LENGTH))
