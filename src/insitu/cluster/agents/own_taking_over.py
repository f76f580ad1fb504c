"""The part of an agent that makes its node the head's, where the head is lost for long and nobody says so.

When that is, is decided in `decide/taking_over.py`; how it is done, in `take_over.py`.
"""

from __future__ import annotations

import logging
import threading
import time

from insitu.cluster.agents.head_change import HeadChange
from insitu.cluster.agents.take_over import NotNow, take_over_if_due
from insitu.cluster.decide import taking_over
from insitu.errors import InsituError
from insitu.paths import Paths
from insitu.spec import NodeId

logger = logging.getLogger("insitu")
_TICK_SECONDS = 0.5


class OwnTakingOver:
    """Watches, in a thread, for how long the agent has had no head."""

    def __init__(self, paths: Paths, node: NodeId, head: HeadChange) -> None:
        self._paths = paths
        self._node = node
        self._head = head
        #: Written by the thread.
        self._vacancy = taking_over.Vacancy(None)
        #: What was said last about an obstacle.
        self._said = ""
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="insitu-take-over", daemon=True)

    def begin(self) -> None:
        """Watch from now on."""
        self._thread.start()

    def close(self) -> None:
        """Begin no attempt any more."""
        self._stopping.set()

    def _watch(self) -> None:
        while not self._stopping.wait(_TICK_SECONDS):
            try:
                self._advance()
            except Exception as error:  # the agent goes on serving, whatever is wrong here
                self._vacancy = taking_over.note_failure(self._vacancy, time.monotonic())
                logger.warning("this node doesn't take over: %s: %s", type(error).__name__, error)

    def _advance(self) -> None:
        after, lost_at = self._head.read_vacancy()
        now = time.monotonic()
        if after != self._vacancy.after:
            self._vacancy = taking_over.set_time(self._vacancy, after)
        if lost_at is None:
            self._vacancy = taking_over.find_head(self._vacancy)
        elif lost_at != self._vacancy.lost_at:
            self._vacancy = taking_over.lose_head(self._vacancy, lost_at)
        if (
            not taking_over.is_due(self._vacancy, now)
            or after is None
            or lost_at is None
            or self._paths.head.exists()
        ):
            return
        try:
            address = take_over_if_due(self._paths, after, now - lost_at - after)
            logger.warning("this node has taken over: the head is at %s", address)
        except NotNow as obstacle:
            self._vacancy = taking_over.note_verdict(self._vacancy, obstacle.verdict, time.monotonic())
            self._say(obstacle.verdict.obstacle)
        except (InsituError, OSError) as error:
            self._vacancy = taking_over.note_failure(self._vacancy, time.monotonic())
            self._say(str(error))

    def _say(self, text: str) -> None:
        if text and text != self._said:
            self._said = text
            logger.warning("this node doesn't take over: %s", text)
