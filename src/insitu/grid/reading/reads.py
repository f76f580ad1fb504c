"""Counts the rows and bytes that this process has read from its own node and from other nodes."""

from __future__ import annotations

import atexit
import json
import logging
import os
import threading
from dataclasses import asdict, dataclass
from pathlib import Path

from insitu.base.errors import GridError
from insitu.grid.catalog import publish_file

logger = logging.getLogger("insitu")


@dataclass(slots=True)
class Reads:
    """Rows and bytes that went into batches."""

    #: Bytes from the store of this task's own node.
    local_bytes: int = 0
    #: Bytes from the stores of other nodes.
    remote_bytes: int = 0
    #: Rows from the store of this task's own node.
    local_rows: int = 0
    #: Rows from the stores of other nodes.
    remote_rows: int = 0


class ReadCounter:
    """Counts for this process. `count` may be called by several threads."""

    def __init__(self) -> None:
        self._reads = Reads()
        self._target: Path | None = None
        self._lock = threading.Lock()
        self._pid = os.getpid()
        #: Whether the last `publish` failed. Written by it.
        self._failed = False

    @property
    def reads(self) -> Reads:
        with self._lock:
            return Reads(**asdict(self._reads))

    def count(self, local_bytes: int, remote_bytes: int, local_rows: int, remote_rows: int) -> None:
        with self._lock:
            self._reads.local_bytes += local_bytes
            self._reads.remote_bytes += remote_bytes
            self._reads.local_rows += local_rows
            self._reads.remote_rows += remote_rows

    def write_to(self, target: Path) -> None:
        """Make `publish`, and the end of this process, write the counts to `target` as JSON."""
        if self._target is None:
            atexit.register(self.publish)
        self._target = target

    def publish(self) -> None:
        """Write the counts, if a target has been named, in one atomic step. A forked child doesn't.

        Training doesn't need them: a disk that is full or fails is a warning, once.
        """
        if self._target is None or os.getpid() != self._pid:
            return
        try:
            publish_file(self._target, json.dumps(asdict(self.reads)).encode())
            self._failed = False
        except (GridError, OSError) as error:
            if not self._failed:
                logger.warning(
                    "How many rows were read can't be written down: %s. Training continues.", error
                )
            self._failed = True


READS = ReadCounter()
