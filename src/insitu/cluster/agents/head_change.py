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
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

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
            )
            write_agent(self._paths, self._node, record)
            self._is_led = True

    def note_lost(self) -> None:
        """The agent has no connection to a head any more."""
        self._is_led = False

    def answer(self, kind: str, fields: Fields) -> Fields:
        """Say what this agent has seen, or obey. Raises InputError where it doesn't obey."""
        with self._lock:
            record = read_agent(self._paths, self._node)
            if record is None or fields.get("cluster") != record.cluster:
                raise InputError(f"{self._node} belongs to another cluster")
            if kind == "head_view":
                return {"epoch": record.epoch, "is_led": self._is_led}
            return self._obey(record, fields)

    def _obey(self, record: AgentRecord, fields: Fields) -> Fields:
        address, epoch, instance = (fields.get(name) for name in ("address", "epoch", "instance"))
        if type(epoch) is not int or type(instance) is not str or type(address) is not str:
            raise InputError("A head has an address, an epoch and an instance. Received: others")
        parse_address(address)
        if self._is_led:
            raise InputError(f"{self._node} is led by the head at {record.head}, which lives")
        if not may_obey(Claim(record.epoch, record.instance), Claim(epoch, instance)):
            raise InputError(
                f"{self._node} has obeyed the head at {record.head}, whose epoch {record.epoch} isn't lower "
                f"than {epoch}"
            )
        write_agent(self._paths, self._node, replace(record, head=address, epoch=epoch, instance=instance))
        self._address = address
        os.eventfd_write(self._event, 1)
        logger.warning("the head at %s takes over, in epoch %d", address, epoch)
        return {"epoch": epoch}
