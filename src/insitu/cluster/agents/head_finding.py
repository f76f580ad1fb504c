"""Finds the head that has taken over while an agent was away, for an agent that dials the one before.

The other agents are asked by the servers of their stores, at the addresses and with the certificates that the
head of before has said. So it finds nothing where none of them has run since.
"""

from __future__ import annotations

import contextlib
import logging
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from insitu.cluster.agents.records import read_agent
from insitu.cluster.agents.saved_members import read_kept_members
from insitu.cluster.files import RemotePeers, View
from insitu.errors import InsituError
from insitu.exchange import parse_address
from insitu.grid.transfer import ServerAddress
from insitu.paths import Paths
from insitu.spec import NodeId

logger = logging.getLogger("insitu")
_ASK_SECONDS = 3.0
_AGAIN_SECONDS = 30.0
_AT_ONCE = 16


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
        """Return epoch and address of the head of each other agent that is led."""
        known = {
            n: ServerAddress(m.facts.address, m.facts.port, m.facts.certificate)
            for n, m in read_kept_members(self._paths).items()
            if n != self._node and m.state != "left"
        }
        view = View(known, len(known))
        with contextlib.closing(RemotePeers(self._token.encode(), silence=_ASK_SECONDS)) as peers:

            def ask(node: NodeId) -> tuple[int, str] | None:
                try:
                    answer: dict[str, Any] = peers.find(node, view).act("head_view", {"cluster": cluster})[0]
                    address, epoch = answer["head"], answer["epoch"]
                    parse_address(address)
                    return (int(epoch), str(address)) if answer["is_led"] is True else None
                except (InsituError, OSError, KeyError, TypeError, ValueError):
                    return None

            with ThreadPoolExecutor(_AT_ONCE) as threads:
                return [found for found in threads.map(ask, known) if found is not None]
