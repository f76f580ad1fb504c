"""Bounds the log of a process that runs for months, and logs what it continues without."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Iterator
from pathlib import Path

from insitu.base.errors import ClusterError, GridError
from insitu.cluster.job_files import rotated_path
from insitu.cluster.wire.detached import open_log

logger = logging.getLogger("insitu")

MAX_LOG_BYTES = 16 << 20
_INTERVAL = 30.0
"""Seconds between two looks at its length."""


def keep_log_bounded(log: Path) -> None:
    """Rotate `log` from now on, in a thread, where it is what this process writes its errors to."""

    def watch() -> None:
        while not threading.Event().wait(_INTERVAL):
            rotate_long_log(log)

    threading.Thread(target=watch, name="insitu-log", daemon=True).start()


def rotate_long_log(log: Path, most: int = MAX_LOG_BYTES) -> bool:
    """Put the log of this process aside if it has more than `most` bytes, in the place of the part before it.

    What is written meanwhile comes into one of the two files. Returns whether it was done. A log that belongs
    to others, such as a scheduler's, stays as it is.
    """
    try:
        own, found = os.fstat(2), log.stat(follow_symlinks=False)
    except OSError:
        return False
    if not os.path.samestat(own, found) or own.st_size <= most:
        return False
    older = rotated_path(log)
    try:
        log.rename(older)
    except OSError:
        return False
    try:
        with open_log(log) as new:
            for descriptor in (1, 2):
                if os.path.samestat(os.fstat(descriptor), own):
                    os.dup2(new.fileno(), descriptor)
    except (OSError, ClusterError):
        with contextlib.suppress(OSError):
            older.rename(log)
        return False
    logger.info("the log before this is %s", older.name)
    return True


@contextlib.contextmanager
def damage_logged() -> Iterator[None]:
    """Let agents join although the catalogue can't be read: `insitu repair` needs them."""
    try:
        yield
    except GridError as error:
        logger.warning("%s", error)
