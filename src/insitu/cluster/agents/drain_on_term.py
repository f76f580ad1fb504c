"""`insitu agent --drain-on-term`: SIGTERM drains the node before its agent ends."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping

from insitu.cluster.decide import Member
from insitu.cluster.engines import Channel
from insitu.spec import NodeId

logger = logging.getLogger("insitu")


class DrainOnTerm:
    """What a signal has begun."""

    def __init__(self, seconds: float) -> None:
        """`seconds` that the drain may take; 0: the agent ends at once."""
        self._seconds = seconds
        #: When the agent ends at the latest, on the monotonic clock; None before the signal.
        self._until: float | None = None
        #: Whether the head knows it.
        self._asked = False
        #: Whether the head has refused.
        self._refused = False

    def begin(self) -> bool:
        """Note the signal. Returns False where the agent is to end at once, as by a second one."""
        if not self._seconds or self._until is not None:
            return False
        self._until = time.monotonic() + self._seconds
        return True

    def refuse(self, why: str) -> None:
        """Note that the node can't be drained."""
        logger.warning("not drained: %s", why)
        self._refused = True

    def advance(self, channel: Channel, members: Mapping[NodeId, Member], node: NodeId) -> bool:
        """Have the head drain the node. Returns True once the agent is to end. Raises ChannelClosed."""
        if self._until is None:
            return False
        left = self._until - time.monotonic()
        if not self._asked:
            self._asked = True
            logger.info("SIGTERM: this node is drained within %.0f s", left)
            channel.send({"do": "drain", "seconds": max(0.0, left)})
            return False
        own = members.get(node)
        return left <= 0 or self._refused or (own is not None and own.is_empty)
