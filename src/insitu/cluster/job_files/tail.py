"""Reads a growing log from its start until its writer is done."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

POLL_INTERVAL = 0.05
"""Seconds between two reads of a log that hasn't grown."""
_CHUNK = 1 << 20


def follow(
    path: Path, is_over: Callable[[], bool], poll_interval: float = POLL_INTERVAL, start: int = 0
) -> Iterator[list[bytes]]:
    """Yield the whole lines of `path` from byte `start` on, without their ends, in batches as they come.

    Ends once `is_over` and everything is read. A last line that lacks its end is yielded at the end.
    """
    rest = b""
    with path.open("rb", buffering=0) as file:
        file.seek(start)
        while True:
            # Asked before reading: what is written until the answer is "over" will then be read.
            over = is_over()
            while data := file.read(_CHUNK):
                *lines, rest = (rest + data).split(b"\n")
                if lines:
                    yield lines
            if over:
                break
            time.sleep(poll_interval)
    if rest:
        yield [rest]
