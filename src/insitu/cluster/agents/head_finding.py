"""Finds the head that has taken over while an agent was away, for an agent that dials the one before.

The other agents are asked at the addresses that the head of before has said (`known_agents.py`). So it finds
nothing where none of them has run since.
"""

from __future__ import annotations

import contextlib
import logging
import time

from insitu.cluster.agents.known_agents import open_agents
from insitu.cluster.agents.records import read_agent
from insitu.errors import InsituError
from insitu.exchange import parse_address
from insitu.paths import Paths
from insitu.spec import NodeId

logger = logging.getLogger("insitu")
_ASK_SECONDS = 3.0
_AGAIN_SECONDS = 30.0


class HeadFinder:
    """Looks now and then for the head that the other agents of the cluster obey."""

    def __init__(self, paths: Paths, node: NodeId, token: str) -> None:
        self._paths = paths
        self._node = node
        self._token = token
        #: When it looks again, on the monotonic clock.
        self._look_at = 0.0

    def find(self, lost: str) -> str:
        """Return the address of the head that leads other agents, in an epoch above all that this one has
        seen; "" where there is none, or it was looked for lately. `lost` is the one that can't be reached."""
        now = time.monotonic()
        if now < self._look_at:
            return ""
        self._look_at = now + _AGAIN_SECONDS
        with contextlib.suppress(InsituError, OSError):
            record = read_agent(self._paths, self._node)
            if record is not None:
                epoch, address = max(self._ask_others(record.cluster), default=(0, ""))
                if epoch > record.epoch and address != lost:
                    logger.warning("the head at %s is lost: other agents obey the one at %s", lost, address)
                    return address
        return ""

    def _ask_others(self, cluster: str) -> list[tuple[int, str]]:
        """Return epoch and address of the head of each other agent that is led. Raises ClusterError."""
        with open_agents(self._paths, cluster, self._token, _ASK_SECONDS, without=(self._node,)) as agents:
            answers = agents.ask("head_view").values()
        found = []
        for answer in answers:
            with contextlib.suppress(InsituError, KeyError, TypeError, ValueError):
                parse_address(answer["head"])
                if answer["is_led"] is True:
                    found.append((int(answer["epoch"]), str(answer["head"])))
        return found
