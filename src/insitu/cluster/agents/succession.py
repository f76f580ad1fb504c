"""What a head does that has taken over, beside its other work, and what one does that was replaced.

A process of its own (`succeeding.py`) has the jobs go on that were lost with the head before, and tells
agents that were away, and the head of before, whom they obey now.
"""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Sequence

from insitu.cluster.agents.messages import Message
from insitu.cluster.agents.node_list import describe_taking_over
from insitu.cluster.agents.records import HeadRecord, change_head
from insitu.errors import ClusterError
from insitu.paths import Paths

logger = logging.getLogger("insitu")
SUCCEED_COMMAND = (sys.executable, "-P", "-m", "insitu.cluster.agents.succeeding")
_AGAIN_SECONDS = 30.0


class Succession:
    """Keeps the process running, where the head of this home has taken over."""

    def __init__(self, paths: Paths, record: HeadRecord, command: Sequence[str] = SUCCEED_COMMAND) -> None:
        self._paths = paths
        self._is_needed = record.taken_over is not None
        self._command = command
        self._process: subprocess.Popen[bytes] | None = None
        #: When it is started next, on the monotonic clock.
        self._start_at = 0.0
        if record.taken_over is not None:
            logger.warning("%s", describe_taking_over(record.taken_over))

    def advance(self, now: float) -> None:
        """Start the process where it doesn't run. `now`: the monotonic clock."""
        if not self._is_needed or now < self._start_at:
            return
        if self._process is not None and self._process.poll() is None:
            return
        self._start_at = now + _AGAIN_SECONDS
        try:
            self._process = subprocess.Popen(
                [*self._command, str(self._paths.home)], stdin=subprocess.DEVNULL
            )
        except OSError as error:
            logger.warning("jobs don't go on here yet: %s", error)

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()


def note_successor(paths: Paths, record: HeadRecord, message: Message) -> None:
    """Write down that another head has taken over from the one with this record. Raises ClusterError where
    that isn't so."""
    cluster, epoch, address = (message.get(name) for name in ("cluster", "epoch", "address"))
    if cluster != record.cluster or type(epoch) is not int or type(address) is not str:
        raise ClusterError("A head is replaced by one of its own cluster. Received: another one")
    if epoch <= record.epoch:
        raise ClusterError(f"A head is replaced by a higher epoch than {record.epoch}. Received: {epoch}")
    logger.warning("the head at %s has taken over, in epoch %d: this one ends", address, epoch)
    change_head(paths, successor=address)
