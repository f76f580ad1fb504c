"""Memory that is lent for a time: the owner can take it back, also from a process that was stopped.

A segment that is lent has a word for each borrower, which holds the number of its grant. A borrower locks the
segment with others while it writes, and writes only if the word is that of its grant. The owner changes the
word under the lock for itself alone. So once it has the memory back, no late write can reach it; and the
system
releases the lock of a borrower that ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import time

from insitu.base.errors import ExchangeError
from insitu.exchange.memory import Segment

GRANT_BYTES = 4096
"""Bytes behind the memory of a segment that is lent, for the grants of BORROWERS."""
BORROWERS = GRANT_BYTES // 8
_RETRY_INTERVAL = 0.0005
_SHARED_TIMEOUT = 0.2
"""Seconds for which a borrower tries to lock the segment; the owner holds the lock for microseconds."""


class Lender:
    """The owner's side of one segment."""

    def __init__(self, segment: Segment, size: int) -> None:
        """`size` bytes are lent; GRANT_BYTES follow in the segment, all zero."""
        self._segment = segment
        self._size = size
        self._grants = memoryview(segment.array()[size:]).cast("B").cast("Q")  # type: ignore[arg-type]

    def grant(self, borrower: int) -> dict[str, int]:
        """Return what a borrower needs, for a Borrower: the offset of its word, and the number of its
        grant."""
        self._grants[borrower] += 1
        return {"word": self._size + 8 * borrower, "grant": self._grants[borrower]}

    def take_back(self, borrower: int, timeout: float) -> None:
        """Take the memory back. Raises ExchangeError if the borrower is in the middle of a write for so
        long."""
        if borrower >= BORROWERS:
            return  # nothing was granted
        deadline = time.monotonic() + timeout
        while True:
            try:
                fcntl.flock(self._segment.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise ExchangeError(
                        f"A process that was lent memory must end its write within {timeout:g} s. Received: "
                        f"it is "
                        "stopped in the middle of one. Resume it, or end it"
                    ) from None
                time.sleep(_RETRY_INTERVAL)
        try:
            self._grants[borrower] += 1
        finally:
            fcntl.flock(self._segment.file, fcntl.LOCK_UN)


class Borrower:
    """The borrower's side of one segment."""

    def __init__(self, segment: Segment, word: int, grant: int) -> None:
        """Raises ExchangeError if there is no such word."""
        if word % 8 or not 0 <= word <= segment.size - 8:
            raise ExchangeError(f"The word of a grant must be in the segment. Received: offset {word}")
        self._file = segment.file
        self._segment = segment
        self._words = memoryview(segment.array()).cast("B")[word : word + 8].cast("Q")  # type: ignore[arg-type]
        self._grant = grant

    def begin(self) -> None:
        """Begin to write. Raises ExchangeError if the memory was taken back; else call `end`."""
        try:
            fcntl.flock(self._file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            self._lock_late()
        if self._words[0] != self._grant:
            self.end()
            raise _withdrawn_error()

    def _lock_late(self) -> None:
        deadline = time.monotonic() + _SHARED_TIMEOUT
        while time.monotonic() < deadline:
            time.sleep(_RETRY_INTERVAL)
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(self._file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                return
        raise _withdrawn_error()

    def end(self) -> None:
        """End a write."""
        fcntl.flock(self._file, fcntl.LOCK_UN)


def _withdrawn_error() -> ExchangeError:
    return ExchangeError(
        "Memory can be written to as long as it is lent. Received: a write after it was taken back. "
        "Nothing was written; the worker asks again"
    )
