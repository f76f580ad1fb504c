"""Lets an agent obey a head on another machine, after the one that it knows is lost.

Who takes over asks each agent twice by the server of its store: what it has seen, then to obey. The agent
keeps the new head's claim on its disk before it answers, and dials there from then on. The decisions are in
`decide/fencing.py`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from insitu.cluster.agents.messages import parse_seconds
from insitu.cluster.agents.records import AgentRecord, read_agent, write_agent
from insitu.cluster.decide import Claim, may_obey
from insitu.errors import ClusterError, InputError
from insitu.exchange import parse_address
from insitu.paths import Paths
from insitu.processes import identify_process
from insitu.spec import NodeId

logger = logging.getLogger("insitu")
KINDS = ("head_view", "obey_head")

Fields = dict[str, Any]


class HeadChange:
    """Whom one agent obeys: kept on its disk, written by its own thread and by those of its server."""

    def __init__(self, paths: Paths, node: NodeId) -> None:
        self._paths = paths
        self._node = node
        self._lock = threading.Lock()
        #: True while the agent is connected to a head.
        self._is_led = False
        #: When the agent has lost its head, or has promised to obey another one, on the monotonic clock.
        #: None: it is led, or hasn't had a head.
        self._without_since: float | None = None
        #: The address of the head that has taken over; "" where none has.
        self._address = ""
        self._event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def fileno(self) -> int:
        """Return what becomes readable when there is another head to be obeyed."""
        return self._event

    def take_address(self, address: str) -> str:
        """Return the address of the head to dial, which is `address` unless another one has taken over."""
        with self._lock, contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._event)
        return self._address or address

    def note_joined(self, head: Mapping[str, Any], address: str) -> None:
        """Keep, for the next agent of this store and for commands in this home, that the agent obeys a head.

        `head` is what that says about itself. Raises ClusterError where a higher one has asked meanwhile.
        """
        own = identify_process(os.getpid())
        asked = Claim(int(head["epoch"]), str(head["instance"]))
        with self._lock:
            seen = read_agent(self._paths, self._node)
            if seen is not None and not may_obey(Claim(seen.epoch, seen.instance), asked):
                raise ClusterError(f"The head at {seen.head} has taken over from the one at {address}")
            record = AgentRecord(
                str(head["cluster"]),
                address,
                asked.number,
                asked.instance,
                socket.gethostname(),
                os.getpid(),
                own.start if own else 0,
                seen.take_over_after if seen is not None else None,
            )
            write_agent(self._paths, self._node, record)
            self._is_led, self._without_since = True, None

    def note_lost(self) -> None:
        """The agent has no connection to a head any more."""
        with self._lock:
            self._is_led, self._without_since = False, time.monotonic()

    def note_time(self, after: float | None) -> None:
        """Keep the time without a head after which a node takes over, as the head has said it."""
        with self._lock:
            record = read_agent(self._paths, self._node)
            if record is not None and record.take_over_after != after:
                write_agent(self._paths, self._node, replace(record, take_over_after=after))

    def read_vacancy(self) -> tuple[float | None, float | None]:
        """Return the time of `note_time`, and since when there is no head on the monotonic clock."""
        with self._lock:
            record = read_agent(self._paths, self._node)
            return (None if record is None else record.take_over_after), self._without_since

    def answer(self, kind: str, fields: Fields) -> Fields:
        """Say what this agent has seen, or obey. Raises InputError where it doesn't obey."""
        with self._lock:
            record = read_agent(self._paths, self._node)
            if record is None or fields.get("cluster") != record.cluster:
                raise InputError(f"{self._node} belongs to another cluster")
            if kind == "head_view":
                return {
                    "head": record.head,
                    "epoch": record.epoch,
                    "is_led": self._is_led,
                    "without_head": self._measure_vacancy(),
                }
            return self._obey(record, fields)

    def _measure_vacancy(self) -> float:
        return 0.0 if self._without_since is None else time.monotonic() - self._without_since

    def _obey(self, record: AgentRecord, fields: Fields) -> Fields:
        """`after` among the fields: seconds for which the agent must have been without a head."""
        address, epoch, instance = (fields.get(name) for name in ("address", "epoch", "instance"))
        after = parse_seconds("after", fields.get("after", 0.0))
        if type(epoch) is not int or type(instance) is not str or type(address) is not str:
            raise InputError("A head has an address, an epoch and an instance. Received: others")
        parse_address(address)
        if self._is_led:
            raise InputError(f"{self._node} is led by the head at {record.head}, which lives")
        is_new = Claim(record.epoch, record.instance) != Claim(epoch, instance)
        if after and record.take_over_after is None:
            raise InputError(f"{self._node} obeys another head where somebody says so, as its own has said")
        after = max(after, record.take_over_after or 0.0) if after else 0.0
        if is_new and self._measure_vacancy() < after:
            raise InputError(
                f"{self._node} must have been without a head for {after:g} s. Received: "
                f"{self._measure_vacancy():.1f} s"
            )
        if not may_obey(Claim(record.epoch, record.instance), Claim(epoch, instance)):
            raise InputError(
                f"{self._node} has obeyed the head at {record.head}, whose epoch {record.epoch} isn't lower "
                f"than {epoch}"
            )
        write_agent(self._paths, self._node, replace(record, head=address, epoch=epoch, instance=instance))
        self._address = address
        if is_new:
            self._without_since = time.monotonic()  # who has asked gets the time to begin
        os.eventfd_write(self._event, 1)
        logger.warning("the head at %s takes over, in epoch %d", address, epoch)
        return {"epoch": epoch}
